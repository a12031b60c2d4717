// All runs, and the curves of the chosen ones over one another.
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { useData } from "./api.js";
import { Curves } from "./curves.js";
import { score, when } from "./format.js";
import { useKeys } from "./keys.js";
import { Problem } from "./parts.js";
import { change, go, runLink } from "./route.js";
import { CATEGORIES } from "./scales.js";

const REFRESH_MS = 5000;
const FIRST = 5; // runs that are shown without a choice

export function RunsList({ values }) {
  const [tick, setTick] = useState(0);
  const [row, setRow] = useState(0);
  const { data, error } = useData("runs", tick);
  const runs = data?.runs ?? [];
  const anyRuns = runs.some((run) => run.state === "running");
  useEffect(() => {
    const timer = anyRuns ? setInterval(() => setTick((old) => old + 1), REFRESH_MS) : null;
    return () => clearInterval(timer);
  }, [anyRuns]);
  const chosen = values.runs === undefined
    ? runs.filter((run) => run.step > 0).slice(0, FIRST).map((run) => run.name)
    : values.runs.split(",").filter(Boolean);
  const colourOf = (name) => CATEGORIES[chosen.indexOf(name) % CATEGORIES.length];
  const toggle = (name) =>
    change({ runs: (chosen.includes(name) ? chosen.filter((other) => other !== name) : [...chosen, name]).join(",") || "," });
  const move = (by) => setRow((old) => Math.min(runs.length - 1, Math.max(0, old + by)));
  useKeys({
    j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
    Enter: () => runs[row] && go(runLink(runs[row].name)),
    " ": () => runs[row] && toggle(runs[row].name),
  });
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return null;
  if (!runs.length) return html`<${NoRuns} place=${data.place} />`;
  return html`
    <div class="row"><h1 class="grow">Runs</h1><span class="soft cut">${data.place}</span></div>
    <div class="card flush scrolls"><table>
      <thead><tr><th></th><th>Run</th><th>State</th><th class="number">Step</th><th class="number">Held out</th><th class="optional">Started</th><th class="optional">Model</th></tr></thead>
      <tbody>${runs.map((run, index) => html`
        <tr class="link" aria-selected=${String(index === row)} onClick=${() => go(runLink(run.name))}>
          <td onClick=${(event) => event.stopPropagation()}><label class="pick" style=${{ color: chosen.includes(run.name) ? colourOf(run.name) : undefined }}>
            <input type="checkbox" checked=${chosen.includes(run.name)} onChange=${() => toggle(run.name)} aria-label=${`Show the curves of ${run.name}`} /></label></td>
          <td><a href=${runLink(run.name)} onClick=${(event) => event.stopPropagation()}>${run.name}</a>
            ${run.rerun && html`<div class="soft small">${rerunOf(run.rerun)}</div>`}
            ${run.problem && html`<div class="bad small">${run.problem}</div>`}</td>
          <td><${State} value=${run.state} /></td>
          <td class="number">${run.step ?? "–"}<span class="faint"> / ${run.steps ?? "–"}</span></td>
          <td class="number">${run.before === null || run.before === undefined ? "–" : html`${score(run.before)} → ${score(run.after)}${run.agent_changed ? " (agent changed)" : ""}`}</td>
          <td class="optional soft">${when(run.started)}</td>
          <td class="optional soft"><div class="model" title=${run.model}>${(run.model ?? "").split("/").slice(-2).join("/")}</div></td>
        </tr>`)}</tbody>
    </table></div>
    <h2 class="above">Curves</h2>
    ${chosen.length ? html`<${Curves} runs=${chosen.map((name) => ({ name, colour: colourOf(name) }))} values=${values} tick=${tick} />`
      : html`<p class="soft">Choose runs above to see their curves here.</p>`}`;
}

// What a rerun repeats, and with which other settings.
export const rerunOf = ({ name, step, until, changes }) =>
  `rerun of ${name}, ${until > step + 1 ? `steps ${step + 1} to` : "step"} ${until}${changes.length ? `: ${changes.join(" ")}` : ""}`;

export function State({ value }) {
  if (value === "running") return html`<span class="chip good"><i class="dot live"></i>running</span>`;
  return html`<span class=${`chip ${value === "finished" ? "good" : value === "unreadable" ? "bad" : ""}`}>${value}</span>`;
}

function NoRuns({ place }) {
  return html`<div class="empty"><h2>There is no run in ${place} yet</h2>
    <p>A run appears here as soon as it starts. To make one:</p>
    <pre>areal-agents init my_agent && areal-agents train my_agent/config.yaml</pre>
    <p>Or show another folder: <code>areal-agents view FOLDER</code></p></div>`;
}
