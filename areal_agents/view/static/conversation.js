// An episode's branch as a conversation. All texts are text nodes, so nothing in them is interpreted.
import { html, useState } from "./vendor/htm-preact.js";
import { duration, number, range, score } from "./format.js";

const LONG = 1500; // characters that are shown of a long message

export const WHY = {
  "new conversation": "Its first message differs from those of earlier conversations: another agent, or another task.",
  resampled: "The same conversation was sent again, and a new reply was sampled.",
  edited: "A message that was recorded before came back changed.",
  reordered: "Messages that were recorded before came back in another order.",
  "template strips reasoning": "The chat template leaves the reasoning of earlier replies out, so the tokens cannot continue.",
  "template cannot extend": "The chat template cannot add these messages after the recorded tokens.",
  "tools changed": "The tools that were offered differ, and they are part of the prompt.",
  "context compacted": "The agent replaced a part of the conversation, for example by a summary.",
  unknown: "The reason is not known.",
};

// `differs`: the ids of turns that differ from another episode's.
export function Conversation({ turns, start, differs, tokensOf }) {
  return html`<div>${turns.map((turn) => html`<section key=${turn.id} id=${`turn-${turn.id}`} class=${differs?.has(turn.id) ? "differs" : ""}>
    <${TurnHead} turn=${turn} start=${start} tokensOf=${tokensOf} />
    ${turn.deleted
      ? html`<div class="note">The texts and tokens of this turn were deleted, as <code>store.retain</code> requires.</div>`
      : html`${turn.fork && html`<${Fork} fork=${turn.fork} />`}
        ${turn.messages.map((message, i) => html`<${Message} key=${i} message=${message} />`)}
        <${Message} message=${turn.reply} />`}
  </section>`)}</div>`;
}

function TurnHead({ turn, start, tokensOf }) {
  return html`<div class="turn-head">
    <b>Turn ${turn.number}</b>
    ${!turn.deleted && html`<span>${number(turn.prompt_tokens)} prompt + ${number(turn.sampled_tokens)} sampled tokens</span>
      ${turn.imported ? html`<span class="chip" title="No policy of this store sampled it, so it has no logprobs">imported</span>` : html`
      <span>version ${range(turn.version_min, turn.version_max)}</span>
      <span>mean logprob ${number(turn.mean_logprob, 2)}</span>`}
      <span>${turn.finish_reason}</span>`}
    <span>after ${duration(turn.created_at - start)}</span>
    ${turn.label && html`<span class="chip">${turn.label}</span>`}
    ${turn.constrained && html`<span class="chip warn" title="Sampled under a grammar or with a lifted pin; by default not trained">constrained</span>`}
    ${turn.discarded && html`<span class="chip warn" title="It is not trained: it never reached the client, or it was imported as context">${turn.discarded}</span>`}
    ${turn.overrides?.length > 0 && html`<span class="chip" title="Sampling parameters of the request that the proxy replaced">pinned: ${turn.overrides.join(", ")}</span>`}
    ${turn.special_tokens_as_text > 0 && html`<span class="chip">${number(turn.special_tokens_as_text)} special tokens as text</span>`}
    ${turn.rewards?.map((reward) => html`<span class="chip good">${reward.name} ${score(reward.value)}</span>`)}
    ${tokensOf && !turn.deleted && html`<button class="quiet small" onClick=${() => tokensOf(turn)}>tokens</button>`}
  </div>`;
}

export function Fork({ fork }) {
  return html`<div class="note"><b>A new root: ${fork.reason}.</b> ${WHY[fork.reason] ?? ""}
    ${fork.turn && html` It differs from the conversation before at message ${fork.diverged_at + 1}.`}</div>`;
}

function Message({ message }) {
  return html`<article class="message"><div class=${`role ${message.role}`}>${message.role}${message.name && html`<div class="faint small">${message.name}</div>`}</div>
    <div class="body">
      ${message.reasoning && html`<div class="thought"><${Text} text=${message.reasoning} /></div>`}
      ${message.content && html`<${Text} text=${message.content} code=${message.role === "tool"} />`}
      ${message.tool_calls?.map((call, i) => html`<div class="call" key=${i}><span class="name">${call.name}</span><${Text} text=${pretty(call.arguments)} code /></div>`)}
      ${!message.content && !message.tool_calls?.length && !message.reasoning && html`<span class="faint">empty</span>`}
    </div></article>`;
}

function Text({ text, code }) {
  const [whole, setWhole] = useState(false);
  const long = text.length > LONG * 1.3;
  return html`<pre class=${code ? "code" : ""}>${whole || !long ? text : text.slice(0, LONG)}</pre>
    ${long && html`<button class="quiet small" onClick=${() => setWhole(!whole)}>${whole ? "Show less" : `Show all ${number(text.length)} characters`}</button>`}`;
}

function pretty(text) {
  try {
    const value = JSON.parse(text);
    const short = JSON.stringify(value);
    return short.length < 80 ? text : JSON.stringify(value, null, 2);
  } catch {
    return text;
  }
}
