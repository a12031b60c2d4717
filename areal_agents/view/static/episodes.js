// The episodes of a run, the newest first, with filters. A search goes on until a page is full or all was read.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { query, read, runPath } from "./api.js";
import { duration, number, plural, preview, range, score } from "./format.js";
import { useKeys } from "./keys.js";
import { Problem, Status } from "./parts.js";
import { change, episodeLink, go, stepLink } from "./route.js";

const PAGE = 50;
const NAMES = ["text", "split", "status", "min_reward", "max_reward", "task", "step", "tool", "error", "evaluation", "group"];

export function Episodes({ run, values }) {
  const filters = Object.fromEntries(NAMES.filter((name) => values[name]).map((name) => [name, values[name]]));
  const { list, more, stop, resume } = useSearch(run, filters);
  const [row, setRow] = useState(0);
  const search = useRef(null);
  useEffect(() => setRow(0), [query(filters)]);
  const move = (by) => {
    const next = Math.min(list.episodes.length - 1, Math.max(0, row + by));
    setRow(next);
    document.querySelector(`[data-row="${next}"]`)?.scrollIntoView({ block: "nearest" });
    if (next > list.episodes.length - 5) more();
  };
  useKeys({
    j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
    Enter: () => list.episodes[row] && go(episodeLink(run, list.episodes[row].id)),
    "/": () => search.current?.focus(),
  });
  return html`
    <${Filters} filters=${filters} search=${search} />
    <${Problem} error=${list.error} />
    ${list.episodes.length > 0 && html`<table class="episodes"><thead><tr>
      <th>Task</th><th class="number">Score</th><th>Status</th><th class="optional">Taken</th><th class="number optional">Turns</th>
      <th class="number optional">Tokens</th><th class="number optional">Versions</th><th class="number optional">Time</th></tr></thead>
      <tbody>${list.episodes.map((episode, index) => html`<${Row} key=${episode.id} run=${run} episode=${episode} index=${index} selected=${index === row} />`)}</tbody></table>`}
    <div class="searching" aria-live="polite">${list.searching
      ? html`<progress max=${list.newest || 1} value=${list.searched}></progress><span>${plural(list.episodes.length, "episode")} found, ${number(list.searched)} of ${number(list.newest)} read</span><button onClick=${stop}>Stop</button>`
      : list.next !== null
        ? html`<button onClick=${list.stopped ? resume : more}>${list.stopped ? "Search on" : "Show more"}</button><span>${number(list.newest)} episodes in the store</span>`
        : list.loaded && html`<span>${list.episodes.length ? `all ${plural(list.episodes.length, "episode")} shown` : Object.keys(filters).length ? "No episode matches these filters." : "The store has no episodes yet; they appear when agents call the proxy."}</span>`}</div>`;
}

function Row({ run, episode, index, selected }) {
  const open = () => go(episodeLink(run, episode.id));
  return html`<tr class="link" data-row=${index} aria-selected=${String(selected)} onClick=${open}>
    <td class="task-cell"><a href=${episodeLink(run, episode.id)} onClick=${(event) => event.stopPropagation()}>${preview(episode.task_preview) || episode.task_id}</a>
      ${episode.error ? html`<div class="bad small cut">${episode.error}</div>` : html`<div class="faint small cut">${episode.task_id}</div>`}</td>
    <td class="number">${score(episode.score)}</td><td><${Status} value=${episode.status} /></td>
    <td class="optional soft nowrap">${episode.step !== null
      ? html`<a href=${stepLink(run, episode.step)} onClick=${(event) => event.stopPropagation()}>step ${episode.step}</a>`
      : episode.split === "eval" ? html`eval ${episode.evaluation ?? ""}` : ""}</td>
    <td class="number optional">${episode.turns}</td><td class="number optional">${number(episode.sampled_tokens)}</td>
    <td class="number optional">${range(episode.version_min, episode.version_max)}</td>
    <td class="number optional">${episode.ended_at ? duration(episode.ended_at - episode.created_at) : "open"}</td></tr>`;
}

function Filters({ filters, search }) {
  const set = (name) => (event) => change({ [name]: event.target.value.trim() });
  const [open, setOpen] = useState(false);
  const text = (name, label, type = "text") => html`<label class="field rest">${label}<input name=${name} type=${type} step="any" value=${filters[name] ?? ""} onChange=${set(name)} /></label>`;
  const choice = (name, label, options) => html`<label class="field rest">${label}<select name=${name} value=${filters[name] ?? ""} onChange=${set(name)}>
    <option value="">all</option>${options.map((value) => html`<option value=${value}>${value}</option>`)}</select></label>`;
  return html`<form class=${open ? "filters open" : "filters"} onSubmit=${(event) => event.preventDefault()}>
    <label class="field wide">Search in texts<input ref=${search} name="text" role="searchbox" placeholder="messages, tool calls, errors" value=${filters.text ?? ""} onChange=${set("text")} /></label>
    <button type="button" class="unfold" aria-expanded=${String(open)} onClick=${() => setOpen(!open)}>${open ? "Fewer filters" : "More filters"}</button>
    ${choice("split", "Split", ["train", "eval"])}
    ${choice("status", "Status", ["open", "finished", "truncated", "failed", "aborted"])}
    ${text("min_reward", "Score from", "number")}${text("max_reward", "to", "number")}
    ${text("task", "Task id")}${text("step", "Step", "number")}${text("tool", "Tool")}
    ${choice("error", "Error", ["yes", "no"])}
    ${text("evaluation", "Evaluation")}
    ${Object.keys(filters).length > 0 && html`<button type="button" onClick=${() => change(Object.fromEntries(NAMES.map((name) => [name, ""])))}>Clear</button>`}
  </form>`;
}

const EMPTY = { episodes: [], next: null, searched: 0, newest: 0, searching: true, loaded: false, stopped: false, error: null };

function useSearch(run, filters) {
  const [list, setList] = useState(EMPTY);
  const [wanted, setWanted] = useState(PAGE);
  const stopped = useRef(false);
  const [again, setAgain] = useState(0);
  const key = run + query(filters);
  const identity = useRef(key);
  useEffect(() => {
    if (identity.current !== key) {
      identity.current = key;
      stopped.current = false;
      setWanted(PAGE);
    }
    const abort = new AbortController();
    let found = again > 0 && list.key === key ? list : { ...EMPTY, key };
    setList({ ...found, searching: true });
    (async () => {
      try {
        while (found.episodes.length < wanted || !found.loaded) {
          const limit = Math.max(1, Math.min(PAGE, wanted - found.episodes.length));
          const page = await read(runPath(run, "episodes") + query({ ...filters, limit, before: found.next }), { signal: abort.signal });
          found = {
            ...found, episodes: [...found.episodes, ...page.episodes], next: page.next, searched: found.searched + page.searched,
            newest: page.newest, loaded: true, searching: page.next !== null && found.episodes.length + page.episodes.length < wanted, stopped: false,
          };
          setList(found);
          if (page.next === null) break;
          if (stopped.current) break;
        }
        setList({ ...found, searching: false, stopped: stopped.current });
      } catch (error) {
        if (error.name !== "AbortError") setList({ ...found, searching: false, loaded: true, error });
      }
    })();
    return () => abort.abort();
  }, [key, again]);
  const more = () => {
    if (list.searching || list.next === null) return;
    setWanted(list.episodes.length + PAGE);
    stopped.current = false;
    setAgain((old) => old + 1);
  };
  return { list, more, stop: () => (stopped.current = true), resume: more };
}
