// Small pieces that several views show.
import { html } from "./vendor/htm-preact.js";
import { score } from "./format.js";
import { episodeLink } from "./route.js";

export function Problem({ error, title = "This cannot be shown." }) {
  if (!error) return null;
  if (error.status === 401) dispatchEvent(new Event("key-needed"));
  return html`<div class="problem" role="alert"><b>${title}</b> ${error.message ?? error}</div>`;
}

const KINDS = { finished: "good", failed: "bad", truncated: "warn", aborted: "", open: "", trained: "good", dropped: "warn", complete: "", leased: "", pending: "" };

export const Status = ({ value }) => html`<span class=${`chip ${KINDS[value] ?? ""}`}>${value}</span>`;

export const Facts = ({ items }) =>
  html`<dl class="facts">${items.filter(Boolean).map(([name, value, title]) => html`<div title=${title}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

// The scores of a group on a line, with their mean; equal scores are stacked.
export function Strip({ run, episodes, here, low, high }) {
  const scored = episodes.filter((episode) => episode.score !== null);
  if (!scored.length) return html`<span class="faint">no scores yet</span>`;
  const values = scored.map((episode) => episode.score);
  const [least, most] = [Math.min(low ?? Infinity, ...values), Math.max(high ?? -Infinity, ...values)];
  const place = (value) => (most > least ? 4 + (92 * (value - least)) / (most - least) : 50);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const stacked = new Map();
  return html`<svg class="strip" role="img" aria-label=${`${values.length} scores from ${score(Math.min(...values))} to ${score(Math.max(...values))}, mean ${score(mean)}`}>
    <line class="axis" x1="2%" x2="98%" y1="24" y2="24" />
    ${[...scored].sort((a, b) => (a.id === here) - (b.id === here)).map((episode) => {
      const x = place(episode.score);
      const level = stacked.get(Math.round(x)) ?? 0;
      stacked.set(Math.round(x), level + 1);
      const spot = html`<circle class=${episode.id === here ? "here" : ""} cx=${`${x}%`} cy=${24 - Math.min(level, 7) * 2.6} r="4.5"><title>${`${episode.id}: ${score(episode.score)}`}</title></circle>`;
      return run ? html`<a href=${episodeLink(run, episode.id)}>${spot}</a>` : spot;
    })}
    <line class="mean" x1=${`${place(mean)}%`} x2=${`${place(mean)}%`} y1="17" y2="31" />
  </svg>`;
}

export function Choice({ label, value, options, onChange }) {
  return html`<div class="choice" role="group" aria-label=${label}>${options.map(([name, text, disabled]) => html`
    <button aria-pressed=${String(name === value)} disabled=${disabled} onClick=${() => onChange(name)}>${text}</button>`)}</div>`;
}
