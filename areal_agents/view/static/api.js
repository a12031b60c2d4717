// Reads JSON from the server. Paths are relative to the page, which may be at / or at /view/.
import { useEffect, useRef, useState } from "./vendor/htm-preact.js";

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

// Counts the changes of a live run, which the server sends.
export function useChanges(run) {
  const [tick, setTick] = useState({ count: 0, running: false });
  const first = useRef(true);
  useEffect(() => {
    if (run === null) return undefined;
    first.current = true;
    const events = new EventSource("api/" + runPath(run, "events"));
    events.addEventListener("change", (event) => {
      const { running } = JSON.parse(event.data);
      const again = !first.current;
      first.current = false;
      setTick((old) => ({ count: old.count + (again ? 1 : 0), running }));
    });
    return () => events.close();
  }, [run]);
  return tick;
}
