// One training step: its metrics, and its groups with the spread of their scores.
import { html } from "./vendor/htm-preact.js";
import { runPath, useData } from "./api.js";
import { duration, number, preview, score, share } from "./format.js";
import { useKeys } from "./keys.js";
import { Facts, Problem, Status, Strip } from "./parts.js";
import { episodesLink, go, groupLink, stepLink } from "./route.js";

export function Step({ run, step }) {
  const { data, error } = useData(runPath(run, "steps", step));
  const number_ = Number(step);
  const last = data?.last ?? number_;
  useKeys({
    "[": () => number_ > 1 && go(stepLink(run, number_ - 1)),
    "]": () => number_ < last && go(stepLink(run, number_ + 1)),
  });
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return null;
  const metrics = data.metrics ?? {};
  const scores = data.groups.flatMap((group) => group.episodes.map((episode) => episode.score)).filter((value) => value !== null);
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  const stale = metrics.stale_tokens_masked ?? null;
  return html`
    <div class="row"><h1 class="grow">Step ${step}</h1>
      <button disabled=${number_ <= 1} onClick=${() => go(stepLink(run, number_ - 1))}>← ${number_ - 1}</button>
      <button disabled=${number_ >= last} onClick=${() => go(stepLink(run, number_ + 1))}>${number_ + 1} →</button></div>
    <${Facts} items=${[
      ["Reward", score(metrics.reward_mean)],
      ["Groups all / some / none", [metrics.groups_solved_all, metrics.groups_solved_some, metrics.groups_solved_none].map((n) => n ?? "–").join(" / "), "Groups whose episodes all, partly or never solved the task"],
      ["Trained tokens", number(metrics.tokens)],
      ["Staleness", html`${number(metrics.staleness_mean, 2)}<span class="faint"> max ${number(metrics.staleness_max)}</span>`],
      ["Stale tokens masked", stale === null ? "–" : share(stale / Math.max(1, (metrics.tokens ?? 0) + stale))],
      ["Mismatch, on-policy", number(metrics.logprob_diff_on_policy_mean, 4), "Mean difference of the logprobs of engine and trainer with the same weights, in nats"],
      ["Time", html`${duration(metrics.step_s)}<span class="faint"> waited ${duration(metrics.wait_s)}</span>`],
      ["Version", number(metrics.version)],
    ]} />
    <div class="row"><h2 class="grow">${data.groups.length} groups</h2><a href=${episodesLink(run, { step })}>all episodes of this step</a></div>
    ${!data.groups.length && html`<div class="empty"><h2>The store has no groups of this step</h2><p>They were removed, or the trainer was given recorded episodes of another store.</p></div>`}
    <div class="groups">${data.groups.map((group) => html`<section class="card group" key=${group.id}>
      <div class="row"><a class="grow cut" href=${groupLink(run, group.id)}>${preview(JSON.stringify(group.task)) || group.task_id}</a><${Status} value=${group.state} /></div>
      <${Strip} run=${run} episodes=${group.episodes} low=${low} high=${high} />
      <div class="row small soft"><span class="grow cut">${group.id}</span><span>mean ${score(mean(group.episodes))}</span><span>spread ${score(spread(group.episodes))}</span></div>
    </section>`)}</div>`;
}

const scored = (episodes) => episodes.filter((e) => e.score !== null && ["finished", "truncated"].includes(e.status)).map((e) => e.score);

export function mean(episodes) {
  const values = scored(episodes);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

export function spread(episodes) {
  const values = scored(episodes);
  if (values.length < 2) return null;
  const middle = mean(episodes);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}
