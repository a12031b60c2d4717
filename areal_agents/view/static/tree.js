// The branch tree of an episode: one row for each turn in the order of recording, with a line to its parent.
import { html } from "./vendor/htm-preact.js";
import { CATEGORIES } from "./scales.js";

const ROW = 30;
const LANE = 14;
const MOST_LANES = 8;

export function Tree({ forest, leaf, current, choose }) {
  const lane = (node) => Math.min(node.lane, MOST_LANES);
  const x = (node) => 12 + lane(node) * LANE;
  const y = (node) => node.index * ROW + ROW / 2;
  const width = 24 + Math.min(forest.lanes, MOST_LANES + 1) * LANE;
  const onPath = new Set();
  for (let node = forest.byId.get(leaf); node; node = node.above) onPath.add(node.id);
  return html`<nav class="tree" aria-label="Turns">
    <svg width=${width} height=${forest.nodes.length * ROW} aria-hidden="true">
      ${forest.nodes.map((node) => {
        const origin = node.above ?? (node.fork?.turn ? forest.byId.get(node.fork.turn) : null);
        return origin && html`<path d=${`M ${x(origin)} ${y(origin)} C ${x(node)} ${y(origin) + ROW / 2}, ${x(node)} ${y(origin) + ROW / 2}, ${x(node)} ${y(node)}`}
          fill="none" stroke=${CATEGORIES[lane(node) % CATEGORIES.length]} stroke-width="1.6" stroke-dasharray=${node.above ? null : "2 3"} opacity=${onPath.has(node.id) ? 1 : 0.45} />`;
      })}
      ${forest.nodes.map((node) => html`<circle cx=${x(node)} cy=${y(node)} r="4" fill=${node.above ? CATEGORIES[lane(node) % CATEGORIES.length] : "var(--card)"}
        stroke=${CATEGORIES[lane(node) % CATEGORIES.length]} stroke-width="2" opacity=${onPath.has(node.id) ? 1 : 0.5} />`)}
    </svg>
    ${forest.nodes.map((node) => html`<button key=${node.id} class=${onPath.has(node.id) ? "on-path" : "off-path"} style=${{ "--indent": `${width}px` }}
      aria-current=${node.id === current ? "true" : null} onClick=${() => choose(node)} title=${node.fork ? `new root: ${node.fork.reason}` : null}>
      <span class="cut">${node.number}. ${summary(node)}</span><span class="faint small">${node.sampled_tokens ?? ""}</span></button>`)}
  </nav>`;
}

function summary(node) {
  if (node.deleted) return "deleted";
  const call = node.reply.tool_calls?.[0];
  const label = node.label ? `${node.label}: ` : "";
  if (call) return `${label}${call.name}()`;
  return label + (node.reply.content.trim().slice(0, 60) || "empty reply");
}
