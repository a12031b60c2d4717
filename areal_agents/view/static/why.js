// Why a token was trained as it was: each term of its gradient with its value, its formula and what it means.
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { query, read, runPath } from "./api.js";
import { number } from "./format.js";
import { Problem } from "./parts.js";

export function Why({ run, episode, token }) {
  const [state, setState] = useState(null);
  const path = runPath(run, "episodes", episode, "why") + query({ turn: token.turnId, token: String(token.place) });
  useEffect(() => setState(null), [path]);
  const ask = () => {
    setState({ waiting: true });
    read(path).then((data) => setState({ data }), (error) => setState({ error }));
  };
  return html`<section class="card above-small why">
    <div class="row"><h2 class="grow">Why was ${JSON.stringify(token.text)} trained like this?</h2>
      ${!state?.data && html`<button onClick=${ask} disabled=${state?.waiting}>${state?.waiting ? "Computing, some seconds…" : "Explain"}</button>`}</div>
    <${Problem} error=${state?.error} />
    ${state?.data && html`<p>${state.data.verdict}</p>${state.data.steps.map((step) => html`
      <h3>Step ${step.step}${step.use ? `, use ${step.use + 1} of its group` : ""}</h3>
      ${step.fault && html`<p class="bad">${step.fault}</p>`}
      ${!step.recorded && html`<p class="soft">This step left no record of its tokens, so only what follows from the store is shown.</p>`}
      <div class="scrolls"><table><tbody>${(step.path ?? []).map((term) => html`<tr>
        <td class="nowrap">${term.name}</td><td class="number">${shown(term.value)}</td>
        <td><div class="mono soft">${term.formula}</div><div class="small">${term.text}</div></td></tr>`)}</tbody></table></div>`)}`}
  </section>`;
}

const shown = (value) => (typeof value === "number" ? number(value, 4) : value === null || value === undefined ? "–" : String(value));
