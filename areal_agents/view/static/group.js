// One group: the spread of its scores, its episodes, and the choice of two of them to compare.
import { html, useState } from "./vendor/htm-preact.js";
import { part, runPath, useData } from "./api.js";
import { duration, number, range, score } from "./format.js";
import { useKeys } from "./keys.js";
import { Facts, Problem, Status, Strip } from "./parts.js";
import { episodeLink, go, link, stepLink } from "./route.js";
import { mean, spread } from "./step.js";

export function Group({ run, id }) {
  const { data, error } = useData(runPath(run, "groups") + "/" + id.split("/").map(part).join("/"));
  const [row, setRow] = useState(0);
  const [marked, setMarked] = useState([]);
  const episodes = data?.episodes ?? [];
  const mark = (episode) => {
    const next = marked.includes(episode) ? marked.filter((other) => other !== episode) : [...marked.slice(-1), episode];
    setMarked(next);
  };
  const compare = () => go(link(["run", run, "compare"], { a: marked[0], b: marked[1] }));
  const move = (by) => setRow((old) => Math.min(episodes.length - 1, Math.max(0, old + by)));
  useKeys({
    j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
    Enter: () => (marked.length === 2 ? compare() : episodes[row] && go(episodeLink(run, episodes[row].id))),
    c: () => episodes[row] && mark(episodes[row].id),
  });
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return null;
  const ordered = [...episodes].sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity));
  const extremes = [ordered[0], ordered.filter((episode) => episode.score !== null).at(-1)];
  return html`
    <div class="row"><h1>${data.task_id}</h1><${Status} value=${data.state} />${data.reason && html`<span class="soft">${data.reason}</span>`}</div>
    <pre class="task">${typeof data.task === "string" ? data.task : JSON.stringify(data.task, null, 2)}</pre>
    <${Facts} items=${[
      ["Mean score", score(mean(episodes))],
      ["Spread", score(spread(episodes)), "Standard deviation of the scores"],
      ["Episodes", html`${number(episodes.length)}<span class="faint"> of ${data.size}</span>`],
      data.step !== null && ["Step", html`<a href=${stepLink(run, data.step)}>${data.step}</a>`],
      data.version !== null && ["Trained into", `version ${data.version}`],
      data.completed_at && ["Complete after", duration(data.completed_at - data.created_at)],
    ]} />
    <div class="card"><${Strip} run=${run} episodes=${episodes} /></div>
    <div class="row above"><h2 class="grow">Episodes</h2>
      ${extremes[0] && extremes[1] && extremes[0] !== extremes[1] && html`<a href=${link(["run", run, "compare"], { a: extremes[0].id, b: extremes[1].id })}>compare best and worst</a>`}
      <button class="primary" disabled=${marked.length !== 2} onClick=${compare}>Compare two</button></div>
    <table><thead><tr><th></th><th>Episode</th><th class="number">Score</th><th>Status</th><th class="number optional">Turns</th><th class="number">Tokens</th><th class="number optional">Versions</th></tr></thead>
      <tbody>${episodes.map((episode, index) => html`
        <tr class="link" aria-selected=${String(index === row)} onClick=${() => go(episodeLink(run, episode.id))}>
          <td onClick=${(event) => event.stopPropagation()}><input type="checkbox" checked=${marked.includes(episode.id)} onChange=${() => mark(episode.id)} aria-label=${`Compare ${episode.id}`} /></td>
          <td class="cut"><a href=${episodeLink(run, episode.id)}>${episode.index}</a> <span class="faint mono">${episode.id}</span></td>
          <td class="number">${score(episode.score)}</td><td><${Status} value=${episode.status} /></td>
          <td class="number optional">${episode.turns}</td><td class="number">${number(episode.sampled_tokens)}</td>
          <td class="number optional">${range(episode.version_min, episode.version_max)}</td></tr>`)}</tbody></table>`;
}
