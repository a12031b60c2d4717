// The keyboard shortcuts.
import { html } from "./vendor/htm-preact.js";

const KEYS = [
  ["?", "show or hide this list"],
  ["t", "light, dark, or as the system"],
  ["u", "go up: to the run, or to all runs"],
  ["/", "search in texts (episodes)"],
  ["j k", "next and previous row"],
  ["Enter", "open the row"],
  ["c", "mark the row for a comparison (group); twice compares"],
  ["[ ]", "previous and next step or episode"],
  ["x", "conversation or tokens (episode)"],
  ["← → ↑ ↓", "previous and next token, line of tokens"],
  ["+ − 0", "zoom the timeline, show all of it"],
];

export function Help({ close }) {
  return html`<div class="dialog" role="dialog" aria-modal="true" aria-label="Keyboard shortcuts" onClick=${close}>
    <div class="card" onClick=${(event) => event.stopPropagation()}>
      <div class="row"><h2 class="grow">Keyboard</h2><button class="quiet" onClick=${close} aria-label="Close">✕</button></div>
      <table><tbody>${KEYS.map(([keys, does]) => html`<tr><td>${keys.split(" ").map((key) => html`<kbd>${key}</kbd> `)}</td><td>${does}</td></tr>`)}</tbody></table>
    </div></div>`;
}
