// One episode: what it was for, its branch tree, and a branch as a conversation or token by token.
import { html, useEffect, useMemo } from "./vendor/htm-preact.js";
import { runPath, useData } from "./api.js";
import { Conversation } from "./conversation.js";
import { forestOf, leafOf, leaves, pathTo } from "./forest.js";
import { duration, number, preview, range, score, share, when } from "./format.js";
import { useKeys } from "./keys.js";
import { Choice, Facts, Problem, Status, Strip } from "./parts.js";
import { change, episodeLink, episodesLink, go, groupLink, stepLink } from "./route.js";
import { Tokens } from "./tokens.js";
import { Tree } from "./tree.js";

export function Episode({ run, id, values }) {
  const { data, error } = useData(runPath(run, "episodes", id));
  const forest = useMemo(() => (data ? forestOf(data.turns) : null), [data]);
  const shown = values.view === "tokens" ? "tokens" : "conversation";
  const toggle = () => change({ view: shown === "tokens" ? "" : "tokens" });
  useKeys({
    x: toggle,
    "[": () => data?.before && go(episodeLink(run, data.before, kept(values))),
    "]": () => data?.after && go(episodeLink(run, data.after, kept(values))),
  });
  useEffect(() => {
    if (values.turn && data && shown === "conversation") document.getElementById(`turn-${values.turn}`)?.scrollIntoView();
  }, [data, values.turn, shown]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return null;
  const leaf = forest.byId.has(values.leaf) ? values.leaf : leaves(forest).at(-1)?.id;
  const path = leaf ? pathTo(forest, leaf) : [];
  const choose = (node) => change({ leaf: leafOf(node).id, turn: node.id, token: "" });
  const branches = leaves(forest).length;
  return html`
    <div class="row"><h1 class="grow">${preview(JSON.stringify(data.task.input)) || data.task.id}</h1>
      <button disabled=${!data.before} onClick=${() => go(episodeLink(run, data.before, kept(values)))} aria-label="The episode opened before">←</button>
      <button disabled=${!data.after} onClick=${() => go(episodeLink(run, data.after, kept(values)))} aria-label="The episode opened after">→</button></div>
    <div class="row small soft"><span class="mono">${data.id}</span><${Status} value=${data.status} />
      <span class="chip">${data.split}${data.evaluation ? ` ${data.evaluation}` : ""}</span>
      ${data.limit_reached && html`<span class="chip warn">limit: ${data.limit_reached}</span>`}
      <a href=${episodesLink(run, { task: data.task.id })}>task ${data.task.id}</a>
      ${data.forked_from && html`<${Origin} run=${run} origin=${data.forked_from} />`}</div>
    ${data.forks_problem && html`<div class="note">The forks cannot be shown: ${data.forks_problem}</div>`}
    ${data.error && html`<div class="problem above"><b>Error</b><pre>${data.error}</pre></div>`}
    <${Facts} items=${[
      ["Score", score(data.score)],
      ...data.rewards.filter((reward) => reward.name !== "return" || data.rewards.length > 1).slice(0, 4).map((reward) => [`Reward ${reward.name}`, score(reward.value), `${reward.scope} ${reward.target}`]),
      ["Turns", html`${number(data.turns.length)}<span class="faint"> in ${number(branches)} ${branches === 1 ? "branch" : "branches"}</span>`],
      ...forks(data),
      ["Sampled tokens", number(data.sampled_tokens)],
      ["Versions", range(data.version_min, data.version_max)],
      data.step !== null && ["Step", html`<a href=${stepLink(run, data.step)}>${data.step}</a>`],
      ...staleness(data),
      ["Took", data.ended_at ? duration(data.ended_at - data.created_at) : "open", when(data.created_at)],
    ]} />
    ${data.group_id !== null && html`<div class="card group-card"><div class="row small"><a href=${groupLink(run, data.group_id)}>group ${data.group_id}</a><span class="soft">${data.group_state}</span></div>
      <${Strip} run=${run} here=${data.id} episodes=${data.group_episodes} /></div>`}
    ${!data.turns.length ? html`<div class="empty"><h2>No model call was recorded</h2><p>The agent ended before it called the model. ${data.error ? "The error above says why." : "Check the base_url of its client with areal-agents doctor."}</p></div>` : html`
    <div class="episode above">
      <div class="side"><h2>Turns</h2><${Tree} run=${run} forest=${forest} forks=${data.forks} leaf=${leaf} current=${values.turn} choose=${choose} />
        <details><summary class="soft">Task and settings</summary><pre class="code small">${JSON.stringify({ task: data.task, metadata: data.metadata, limits: data.limits, sampling: data.sampling }, null, 2)}</pre></details></div>
      <div class="grow">
        <${Choice} label="View" value=${shown} options=${[["conversation", "Conversation"], ["tokens", "Tokens"]]} onChange=${(name) => change({ view: name === "tokens" ? "tokens" : "" })} />
        ${shown === "conversation"
          ? html`<${Conversation} turns=${path} start=${data.created_at} tokensOf=${(turn) => change({ view: "tokens", leaf, turn: turn.id })} />`
          : html`<${Tokens} key=${leaf} run=${run} episode=${id} leaf=${leaf} turn=${values.turn} values=${values} />`}
      </div>
    </div>`}`;
}

const kept = (values) => ({ view: values.view, colour: values.colour });

function Origin({ run, origin }) {
  const text = `forked from ${origin.episode} at turn ${origin.turn}`;
  const title = `Turn ${origin.turn} was sampled again by ${origin.policy}, seed ${origin.seed}; the turns before it are copies`;
  return origin.is_here ? html`<a title=${title} href=${episodeLink(run, origin.episode, { turn: origin.turn_id })}>${text}</a>` : html`<span title=${title}>${text}</span>`;
}

function forks(data) {
  if (!data.forks.length) return [];
  const scores = data.forks.filter((fork) => fork.status !== "failed" && fork.score !== null).map((fork) => fork.score);
  const fromOne = new Set(data.forks.map((fork) => fork.turn_id)).size === 1;
  const mean = scores.length && fromOne ? html`<span class="faint">, mean score ${score(scores.reduce((sum, value) => sum + value, 0) / scores.length)}</span>` : "";
  return [["Forks", html`${number(data.forks.length)}${mean}`, "Continuations that areal-agents fork sampled; they are below the turns"]];
}

function staleness(data) {
  const counts = Object.entries(data.staleness).map(([value, count]) => [Number(value), count]);
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  if (!total) return [];
  const mean = counts.reduce((sum, [value, count]) => sum + value * count, 0) / total;
  const beyond = counts.filter(([value]) => data.max_staleness !== null && value > data.max_staleness).reduce((sum, [, count]) => sum + count, 0);
  return [
    ["Staleness", html`${number(mean, 2)}<span class="faint"> versions</span>`, "Trainer's version when its batch began minus the version that sampled the token, mean"],
    ["Stale tokens", share(beyond / total), `Tokens older than max_staleness ${data.max_staleness ?? "∞"}, which are not trained`],
  ];
}
