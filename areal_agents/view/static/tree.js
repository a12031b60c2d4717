// The branch tree of an episode: one row for each turn in the order of recording, with a line to its parent,
// and one for each fork, with a line to the turn that it goes on from and a link to its own page.
import { html } from "./vendor/htm-preact.js";
import { score } from "./format.js";
import { episodeLink } from "./route.js";
import { CATEGORIES } from "./scales.js";

const ROW = 30;
const LANE = 14;
const MOST_LANES = 8;

export function Tree({ run, forest, forks, leaf, current, choose }) {
  const lane = (node) => Math.min(node.lane, MOST_LANES);
  const x = (node) => 12 + lane(node) * LANE;
  const y = (node) => node.index * ROW + ROW / 2;
  const width = 24 + Math.min(forest.lanes + (forks.length ? 1 : 0), MOST_LANES + 1) * LANE;
  const left = (fork) => forest.byId.get(fork.turn_id);
  const branches = [...forks].sort((a, b) => (left(a)?.index ?? -1) - (left(b)?.index ?? -1)).map((fork, i) => {
    const turn = left(fork);
    return { fork, turn, origin: turn?.above ?? turn, index: forest.nodes.length + i, lane: forest.lanes };
  });
  const onPath = new Set();
  for (let node = forest.byId.get(leaf); node; node = node.above) onPath.add(node.id);
  return html`<nav class="tree" aria-label="Turns">
    <svg width=${width} height=${(forest.nodes.length + forks.length) * ROW} aria-hidden="true">
      ${forest.nodes.map((node) => {
        const origin = node.above ?? (node.fork?.turn ? forest.byId.get(node.fork.turn) : null);
        return origin && html`<path d=${curve(x(origin), y(origin), x(node), y(node))}
          fill="none" stroke=${CATEGORIES[lane(node) % CATEGORIES.length]} stroke-width="1.6" stroke-dasharray=${node.above ? null : "2 3"} opacity=${onPath.has(node.id) ? 1 : 0.45} />`;
      })}
      ${forest.nodes.map((node) => html`<circle cx=${x(node)} cy=${y(node)} r="4" fill=${node.above ? CATEGORIES[lane(node) % CATEGORIES.length] : "var(--card)"}
        stroke=${CATEGORIES[lane(node) % CATEGORIES.length]} stroke-width="2" opacity=${onPath.has(node.id) ? 1 : 0.5} />`)}
      ${branches.map((node) => html`${node.origin && html`<path d=${curve(x(node.origin), y(node.origin), x(node), y(node))} fill="none" stroke="var(--faint)" stroke-width="1.6" stroke-dasharray=${node.turn.above ? null : "2 3"} />`}
        <circle cx=${x(node)} cy=${y(node)} r="3.5" fill="var(--card)" stroke="var(--faint)" stroke-width="2" />`)}
    </svg>
    ${forest.nodes.map((node) => html`<button key=${node.id} class=${onPath.has(node.id) ? "on-path" : "off-path"} style=${{ "--indent": `${width}px` }}
      aria-current=${node.id === current ? "true" : null} onClick=${() => choose(node)} title=${node.fork ? `new root: ${node.fork.reason}` : null}>
      <span class="cut">${node.number}. ${summary(node)}</span><span class="faint small">${node.sampled_tokens ?? ""}</span></button>`)}
    ${branches.map(({ fork, turn }) => html`<a key=${fork.id} class="fork" style=${{ "--indent": `${width}px` }} href=${episodeLink(run, fork.id)}
      title=${`Fork ${fork.number}${turn ? ` from turn ${turn.number}` : ""}, sampled by ${fork.policy}: ${fork.status}`}>
      <span class="cut">${turn ? `${turn.number}. ` : ""}${fork.call ? `${fork.call}()` : fork.text.slice(0, 60) || "empty reply"}</span>
      <span class=${`chip ${fork.status === "failed" ? "bad" : ""}`}>${fork.status === "failed" ? "failed" : score(fork.score)}</span></a>`)}
  </nav>`;
}

const curve = (fromX, fromY, toX, toY) => `M ${fromX} ${fromY} C ${toX} ${fromY + ROW / 2}, ${toX} ${fromY + ROW / 2}, ${toX} ${toY}`;

function summary(node) {
  if (node.deleted) return "deleted";
  const call = node.reply.tool_calls?.[0];
  const label = node.label ? `${node.label}: ` : "";
  if (call) return `${label}${call.name}()`;
  return label + (node.reply.content.trim().slice(0, 60) || "empty reply");
}
