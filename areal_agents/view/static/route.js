// The address of what is shown is in the fragment, so every view has a link: #/run/NAME/episode/ID?leaf=…
import { useEffect, useState } from "./vendor/htm-preact.js";
import { query } from "./api.js";

export function parse(fragment) {
  const [path, search = ""] = fragment.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { parts, values: Object.fromEntries(new URLSearchParams(search)) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function link(parts, values = {}) {
  return "#/" + parts.map(encodeURIComponent).join("/") + query(values);
}

export const runLink = (run, ...rest) => link(["run", run, ...rest.map(String)]);
export const episodeLink = (run, id, values = {}) => link(["run", run, "episode", id], values);
export const groupLink = (run, id) => link(["run", run, "group", id]);
export const stepLink = (run, step) => link(["run", run, "step", String(step)]);
export const episodesLink = (run, values = {}) => link(["run", run, "episodes"], values);

export function go(address) {
  location.hash = address;
}

// Changes some values of the current address, without a new entry in the history.
export function change(values) {
  const now = parse(location.hash);
  history.replaceState(null, "", link(now.parts, { ...now.values, ...values }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute() {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const update = () => setRoute(parse(location.hash));
    addEventListener("hashchange", update);
    return () => removeEventListener("hashchange", update);
  }, []);
  return route;
}
