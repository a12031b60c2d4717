// The curves of one or several runs over one another, and the choice of metrics.
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { query, read, runPath } from "./api.js";
import { Chart } from "./chart.js";
import { duration, number, score } from "./format.js";
import { Choice, Problem } from "./parts.js";
import { change, episodesLink, go, stepLink } from "./route.js";

const FIRST = ["reward_mean", "entropy", "staleness_mean", "logprob_diff_on_policy_mean", "sampled_tokens_per_s", "trainer_idle"];
const TITLES = {
  reward_mean: "Reward", entropy: "Entropy", staleness_mean: "Staleness", grad_norm: "Gradient norm", loss: "Loss",
  logprob_diff_on_policy_mean: "Mismatch of logprobs, on-policy", logprob_diff_mean: "Difference of logprobs",
  kl_behavior_k3: "KL(behavior, current)", sampled_tokens_per_s: "Sampled tokens per second", trainer_idle: "Trainer idle",
  rollout_idle: "Rollout idle", clip_fraction: "Clipped tokens", step_s: "Seconds per step", weight_capped: "Capped weights",
  ess: "Effective sample size", truncated_share: "Truncated episodes", tokens_per_episode: "Tokens per episode",
  turns_mean: "Turns per episode", lr: "Learning rate",
};
export const titleOf = (name) => TITLES[name] ?? name.replaceAll("_", " ");

// `runs`: [{name, colour}]; `tick` reads them again.
export function Curves({ runs, values, tick }) {
  const metrics = values.m ? values.m.split(",").filter(Boolean) : FIRST;
  const x = values.x === "time" ? "time" : "step";
  const found = useCurves(runs.map((run) => run.name), metrics, tick);
  const show = (names) => change({ m: names.join(",") || "none" });
  const all = [...new Set(runs.flatMap((run) => found[run.name]?.data?.names ?? []))].sort();
  const xName = x === "step" ? "step" : "time";
  const xFormat = x === "step" ? (value) => (Number.isInteger(value) ? number(value) : "") : duration;
  const curvesOf = (pick) => runs.flatMap((run) => {
    const data = found[run.name]?.data;
    return data ? [{ name: run.name, colour: run.colour, ...pick(run.name, data) }] : [];
  });
  const places = (data) => (x === "step" ? data.step : data.time.map((time) => time - data.time[0]));
  const heldOut = curvesOf((name, data) => ({
    x: data.evaluations.map((one) => (x === "step" ? one.step : (one.ended ?? one.began) - (data.time[0] ?? one.began))),
    y: data.evaluations.map((one) => one.reward),
    open: (index) => go(episodesLink(name, { evaluation: data.evaluations[index].label })),
  })).filter((curve) => curve.x.length).map(ascending);
  return html`
    <div class="row toolbar">
      <${Choice} label="Horizontal axis" value=${x} options=${[["step", "Step"], ["time", "Time"]]} onChange=${(name) => change({ x: name === "step" ? "" : name })} />
      <span class="grow"></span>
      <select aria-label="Add a metric" value="" onChange=${(event) => show([...metrics.filter((m) => m !== "none"), event.target.value])}>
        <option value="">Add a metric…</option>
        ${all.filter((name) => !metrics.includes(name)).map((name) => html`<option value=${name}>${titleOf(name)}</option>`)}
      </select>
    </div>
    ${runs.map((run) => html`<${Problem} error=${found[run.name]?.error} title=${`${run.name}:`} />`)}
    ${runs.map((run) => html`<${Problem} error=${found[run.name]?.data?.problem} title=${`${run.name}, store:`} />`)}
    <div class="charts">
      ${heldOut.length > 0 && html`<${Chart} key="held-out" title="Held-out reward" curves=${heldOut} xName=${xName} xFormat=${xFormat} yFormat=${score} points />`}
      ${metrics.filter((name) => name !== "none").map((name) => html`<${Chart} key=${name} title=${titleOf(name)} xName=${xName} xFormat=${xFormat}
        close=${() => show(metrics.filter((other) => other !== name))}
        curves=${curvesOf((run, data) => ({ x: places(data), y: data.columns[name] ?? [], open: (index) => go(stepLink(run, data.step[index])) }))} />`)}
    </div>`;
}

function ascending(curve) {
  const order = curve.x.map((_, index) => index).sort((a, b) => curve.x[a] - curve.x[b]);
  return { ...curve, x: order.map((i) => curve.x[i]), y: order.map((i) => curve.y[i]), open: (index) => curve.open(order[index]) };
}

function useCurves(names, metrics, tick) {
  const [found, setFound] = useState({});
  useEffect(() => {
    const stop = new AbortController();
    for (const name of names) {
      const path = runPath(name, "curves") + query({ name: metrics });
      read(path, { signal: stop.signal }).then(
        (data) => setFound((old) => ({ ...old, [name]: { data, error: null } })),
        (error) => error.name !== "AbortError" && setFound((old) => ({ ...old, [name]: { data: old[name]?.data ?? null, error } })),
      );
    }
    return () => stop.abort();
  }, [names.join("\0"), metrics.join(), tick]);
  return found;
}
