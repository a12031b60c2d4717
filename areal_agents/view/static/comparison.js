// Two episodes side by side, usually of one group; the first turn that differs is marked.
import { html, useMemo } from "./vendor/htm-preact.js";
import { runPath, useData } from "./api.js";
import { Conversation } from "./conversation.js";
import { forestOf, leaves, pathTo } from "./forest.js";
import { number, preview, range, score } from "./format.js";
import { Problem, Status } from "./parts.js";
import { change, episodeLink } from "./route.js";

export function Comparison({ run, values }) {
  const first = useData(values.a ? runPath(run, "episodes", values.a) : null);
  const second = useData(values.b ? runPath(run, "episodes", values.b) : null);
  const left = useMemo(() => branch(first.data, values.leaf_a), [first.data, values.leaf_a]);
  const right = useMemo(() => branch(second.data, values.leaf_b), [second.data, values.leaf_b]);
  if (!values.a || !values.b) return html`<div class="empty"><h2>Choose two episodes</h2><p>Open a group, mark two of its episodes, and compare them.</p></div>`;
  const error = first.error ?? second.error;
  if (error) return html`<${Problem} error=${error} />`;
  if (!left || !right) return null;
  const same = agreement(left.path, right.path);
  const longest = Math.max(left.path.length, right.path.length);
  const differs = new Set([left.path[same]?.id, right.path[same]?.id]);
  return html`
    <h1>${preview(JSON.stringify(left.data.task.input)) || left.data.task.id}</h1>
    <p class="soft">${left.data.task.id !== right.data.task.id
      ? "The episodes are of different tasks."
      : same === longest ? "Both episodes are the same, turn by turn." : same === 0 ? "They differ from the first turn on, which is marked." : `The first ${same === 1 ? "turn is" : `${number(same)} turns are`} the same; turn ${same + 1}, where they part, is marked.`}</p>
    <div class="two">${[["a", left], ["b", right]].map(([name, side]) => html`<div key=${name}>
      <div class="card compare-head"><div class="row"><a class="grow cut mono" href=${episodeLink(run, side.data.id)}>${side.data.id}</a><${Status} value=${side.data.status} /></div>
        <div class="row"><b class="big">${score(side.data.score)}</b><span class="soft">${number(side.data.sampled_tokens)} tokens</span><span class="soft">version ${range(side.data.version_min, side.data.version_max)}</span>
        ${side.ends.length > 1 && html`<select aria-label="Branch" value=${side.path.at(-1).id} onChange=${(event) => change({ [`leaf_${name}`]: event.target.value })}>${side.ends.map((leaf) => html`<option value=${leaf.id}>branch to turn ${leaf.number}</option>`)}</select>`}</div></div>
      ${side.data.error && html`<div class="problem"><b>Error</b><pre>${side.data.error}</pre></div>`}
      <${Conversation} turns=${side.path} start=${side.data.created_at} differs=${differs} />
    </div>`)}</div>`;
}

function branch(data, wanted) {
  if (!data) return null;
  const forest = forestOf(data.turns);
  const ends = leaves(forest);
  const leaf = forest.byId.has(wanted) ? wanted : ends.at(-1)?.id;
  return { data, ends, path: leaf ? pathTo(forest, leaf) : [] };
}

function agreement(left, right) {
  const text = (turn) => JSON.stringify([turn.messages, turn.reply], (key, value) => (key === "id" || key === "tool_call_id" ? undefined : value));
  let same = 0;
  while (same < left.length && same < right.length && text(left[same]) === text(right[same])) same += 1;
  return same;
}
