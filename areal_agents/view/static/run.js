// One run: its state, and tabs with curves, timeline, episodes and configuration.
import { html, useState } from "./vendor/htm-preact.js";
import { runPath, useChanges, useData } from "./api.js";
import { Curves } from "./curves.js";
import { duration, number, score, when } from "./format.js";
import { Facts, Problem } from "./parts.js";
import { runLink } from "./route.js";
import { rerunOf, State } from "./runs.js";
import { CATEGORIES } from "./scales.js";
import { Timeline } from "./timeline.js";

const TABS = [["curves", "Curves"], ["timeline", "Timeline"], ["episodes", "Episodes"], ["config", "Configuration"]];

export function Run({ run, tab, values, children }) {
  const { steps, all, running } = useChanges(run);
  const { data, error } = useData(runPath(run), all);
  if (error && !data) return html`<${Problem} error=${error} />`;
  if (!data) return null;
  const total = data.episodes && Object.values(data.episodes.train).reduce((a, b) => a + b, 0);
  const failed = data.episodes?.train.failed ?? 0;
  const tabs = data.state === "store" ? TABS.filter(([name]) => name === "episodes") : TABS;
  const current = tabs.some(([name]) => name === tab) ? tab : tabs[0][0];
  return html`
    <div class="row"><h1>${data.name}</h1><${State} value=${running ? "running" : data.state} /></div>
    ${data.rerun && html`<p class="soft">${rerunOf(data.rerun)}. Its episodes are those of that run, and the list of them has the scores of that run.</p>`}
    ${data.problem && html`<${Problem} error=${data.problem} title="Metrics:" />`}
    ${data.store_problem && html`<${Problem} error=${data.store_problem} title="Store:" />`}
    <${Facts} items=${[
      data.state !== "store" && ["Step", html`${data.step}<span class="faint"> / ${data.steps}</span>`],
      data.before !== null && data.before !== undefined && ["Held out", `${score(data.before)} → ${score(data.after)}${data.agent_changed ? " (agent changed)" : ""}`, data.agent_changed && `These cannot be compared: ${data.agent_changed}`],
      total !== null && ["Training episodes", number(total)],
      total !== null && ["Failed", html`<span class=${failed ? "bad" : ""}>${number(failed)}</span>`, "Failed for a reason other than the policy; they are attempted again"],
      data.summary?.wall_s && ["Wall time", duration(data.summary.wall_s)],
      data.started && ["Started", when(data.started)],
    ]} />
    <nav class="tabs">${tabs.map(([name, text]) => html`<a href=${runLink(run, ...(name === "curves" ? [] : [name]))} aria-current=${name === current ? "page" : null}>${text}</a>`)}</nav>
    ${current === "curves" && html`<${Curves} runs=${[{ name: run, colour: CATEGORIES[0] }]} values=${values} tick=${steps} />`}
    ${current === "timeline" && html`<${Timeline} run=${run} tick=${steps} />`}
    ${current === "episodes" && children}
    ${current === "config" && html`<${Configuration} config=${data.config ?? {}} />`}`;
}

function Configuration({ config }) {
  const [wanted, setWanted] = useState("");
  const keys = Object.keys(config).filter((key) => key.includes(wanted));
  return html`
    <input placeholder="Filter keys" aria-label="Filter keys" value=${wanted} onInput=${(event) => setWanted(event.target.value)} />
    <table class="fixed config"><tbody>${keys.map((key) => html`<tr><td class="mono soft">${key}</td><td class="mono">${shown(config[key])}</td></tr>`)}</tbody></table>
    ${!keys.length && html`<p class="soft">No key contains “${wanted}”.</p>`}`;
}

const shown = (value) => (typeof value === "string" ? value || "“”" : JSON.stringify(value));
