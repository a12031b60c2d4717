// Reads JSON from the server. Paths are relative to the page, which may be at / or at /view/.
import { useEffect, useState } from "./vendor/htm-preact.js";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function read(path, options) {
  let response;
  try {
    response = await fetch("api/" + path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not answer. Is it still running?");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, body?.error?.message ?? `the server answered ${response.status}`);
  return body;
}

export const part = encodeURIComponent;

export function runPath(run, ...rest) {
  return ["runs", run, ...rest].map(part).join("/");
}

export function query(values) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") search.append(name, one);
    }
  }
  const text = search.toString();
  return text ? "?" + text : "";
}

// The data at a path. While a changed `tick` reads the same path again, the old data stays.
export function useData(path, tick = 0) {
  const [state, setState] = useState({ path: null, data: null, error: null });
  useEffect(() => {
    if (path === null) return undefined;
    const stop = new AbortController();
    read(path, { signal: stop.signal }).then(
      (data) => setState({ path, data, error: null }),
      (error) => {
        if (error.name !== "AbortError") setState((old) => ({ path, data: old.path === path ? old.data : null, error }));
      },
    );
    return () => stop.abort();
  }, [path, tick]);
  return state.path === path ? state : { path, data: null, error: null };
}

// Counts the changes of a live run that the server sends: its steps, and all. The first event of a kind says
// what was read just now.
export function useChanges(run) {
  const [tick, setTick] = useState({ steps: 0, all: 0, running: false });
  useEffect(() => {
    const heard = new Set();
    const events = new EventSource("api/" + runPath(run, "events"));
    const update = (event) => {
      const { running } = JSON.parse(event.data);
      const again = heard.has(event.type) ? 1 : 0;
      heard.add(event.type);
      setTick((old) => ({ steps: old.steps + (event.type === "step" ? again : 0), all: old.all + again, running }));
    };
    events.addEventListener("step", update);
    events.addEventListener("store", update);
    return () => events.close();
  }, [run]);
  return tick;
}
