// The tokens of a branch on one canvas, which draws only what is in sight; numbers of a token on hover.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { query, read, runPath } from "./api.js";
import { number, share } from "./format.js";
import { Choice, Facts, Problem } from "./parts.js";
import { change } from "./route.js";
import { scaleOf } from "./scales.js";
import { colour as themed, useThemeTick } from "./theme.js";
import { layOut, LINE, measure } from "./layout.js";
import { Why } from "./why.js";

const PROMPT_END = 40; // tokens that are shown of a folded prompt
const AHEAD = 2; // heights of the window that are loaded ahead of what is in sight

export function Tokens({ run, episode, leaf, turn, values }) {
  const folded = values.prompts !== "whole";
  const { tokens, heads, state, more } = useTokens(run, episode, leaf, folded);
  const hasTrained = tokens.some((token) => token.trained?.advantage !== null && token.trained);
  const name = values.colour && (hasTrained || !["advantage", "ratio", "mismatch"].includes(values.colour)) ? values.colour : "logprob";
  const scale = useMemo(() => scaleOf(name, tokens), [name, tokens]);
  const picked = values.token ? Number(values.token) : null;
  const [hovered, setHovered] = useState(null);
  const shown = hovered ?? (picked === null ? null : { index: picked });
  return html`
    <div class="row above-small"><${Choice} label="Colour" value=${name} onChange=${(colour) => change({ colour })}
      options=${[["logprob", "Logprob"], ["version", "Version"], ["mask", "Mask"], ["advantage", "Advantage", !hasTrained], ["ratio", "Ratio", !hasTrained], ["mismatch", "Mismatch", !hasTrained]]} />
      <${Choice} label="Prompts" value=${folded ? "end" : "whole"} options=${[["end", "Ends of prompts"], ["whole", "Whole prompts"]]} onChange=${(prompts) => change({ prompts: prompts === "whole" ? prompts : "", token: "" })} /></div>
    <${Problem} error=${state.error} />
    ${state.problem && html`<div class="note">${state.problem}. Ids are shown instead.</div>`}
    ${state.recordProblem && html`<div class="note">What training did with the tokens cannot be shown: ${state.recordProblem}.</div>`}
    <div class="tokens">
      <${Legend} legend=${scale.legend} />
      <${Canvas} tokens=${tokens} heads=${heads} scale=${scale} turn=${turn} picked=${picked} onHover=${setHovered} onPick=${(index) => change({ token: index === null ? "" : String(index) })} more=${more} />
      ${shown && tokens[shown.index] && html`<${Card} token=${tokens[shown.index]} at=${shown.at} />`}
    </div>
    ${picked !== null && tokens[picked]?.sampled && html`<${Why} run=${run} episode=${episode} token=${tokens[picked]} />`}
    <${Shares} tokens=${tokens} />
    <p class="small soft" aria-live="polite">${number(tokens.length)} tokens${state.next === null ? "" : ` of ${state.loaded} of ${state.turns} turns; the rest follows when you scroll`}</p>`;
}

const TRAINED = [
  ["proximal", "logprob, batch begins", 4], ["current", "logprob, trained", 4], ["ratio", "ratio", 4], ["weight", "weight", 4],
  ["advantage", "advantage", 3], ["value", "value", 3], ["reference", "logprob, reference", 4], ["loss_weight", "coefficient", 5], ["loss", "share of the loss", 5],
];

function Legend({ legend }) {
  return html`<div class="legend">
    ${legend.ramp ? html`<span>${legend.low}</span><i class="ramp" style=${{ background: legend.ramp }}></i><span>${legend.high}</span>` : legend.items.map(([colour, text]) => html`<span class="item"><i class="swatch" style=${{ background: colour }}></i>${text}</span>`)}
    <span class="item faint">grey text: prompt, never trained</span></div>`;
}

function Card({ token, at }) {
  const trained = token.trained;
  const style = at ? { left: `${at.x}px`, top: `${at.y}px` } : { right: ".8rem", top: "3.2rem" };
  return html`<div class="hover" role="status" style=${style}>
    <div class="text">${JSON.stringify(token.text)}</div>
    <dl><dt>id</dt><dd>${token.id}</dd><dt>turn, position</dt><dd>${token.turn}, ${token.position}</dd>
    ${token.sampled ? html`
      ${token.version !== null && html`<dt>version</dt><dd>${token.version}</dd>`}${token.staleness !== null && html`<dt>staleness</dt><dd>${token.staleness}</dd>`}
      ${token.logprob !== null && html`<dt>logprob, sampled</dt><dd>${number(token.logprob, 4)}</dd>
      <dt>probability</dt><dd>${number(Math.exp(token.logprob), 4)}</dd>`}
      <dt>mask</dt><dd>${token.mask}</dd>
      ${trained && TRAINED.map(([name, text, digits]) => trained[name] !== null && html`<dt>${text}</dt><dd>${number(trained[name], digits)}${
        name === "ratio" && trained.clipped !== "no" && trained.clipped ? `, clipped ${trained.clipped}` : ""}</dd>`)}
      ${trained && html`<dt>trained in</dt><dd>step ${trained.step}, on version ${trained.version}</dd>`}` : html`<dt>mask</dt><dd>prompt</dd>`}</dl></div>`;
}

// How many of the tokens are not trained, stale, or judged differently by engine and trainer.
function Shares({ tokens }) {
  const sampled = tokens.filter((token) => token.sampled);
  if (!sampled.length) return null;
  const part = (condition) => share(sampled.filter(condition).length / sampled.length);
  const known = sampled.filter((token) => token.trained?.mismatch !== null && token.trained);
  const mean = known.reduce((sum, token) => sum + Math.abs(token.trained.mismatch), 0) / known.length;
  return html`<${Facts} items=${[
    ["Sampled tokens", number(sampled.length)],
    ["Not trained", part((token) => token.mask !== "trained")],
    sampled.some((token) => token.staleness !== null) && ["Of an older version", part((token) => token.staleness > 0)],
    sampled.some((token) => token.staleness !== null) && ["Beyond the bound", part((token) => token.stale)],
    known.length > 0 && ["Mismatch", `${number(mean, 4)} nats`, "Mean |logprob when the batch began − logprob when sampled|: engine against trainer, and the age of the tokens"],
    known.length > 0 && ["Mismatch above 0.1", share(known.filter((token) => Math.abs(token.trained.mismatch) > 0.1).length / known.length)],
    known.length > 0 && ["Clipped", part((token) => token.trained?.clipped && token.trained.clipped !== "no")],
  ]} />`;
}

function Canvas({ tokens, heads, scale, turn, picked, onHover, onPick, more }) {
  const scroll = useRef(null);
  const canvas = useRef(null);
  const [width, setWidth] = useState(0);
  const theme = useThemeTick();
  const layout = useMemo(() => (width ? layOut(tokens, heads, width) : null), [tokens, heads, width]);
  const hover = useRef(null);

  useEffect(() => {
    const resize = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    resize.observe(scroll.current);
    return () => resize.disconnect();
  }, []);

  const draw = () => {
    if (!layout || !canvas.current) return;
    const [element, height, top] = [canvas.current, scroll.current.clientHeight, scroll.current.scrollTop];
    const ratio = devicePixelRatio || 1;
    if (element.width !== width * ratio || element.height !== height * ratio) {
      element.width = width * ratio;
      element.height = height * ratio;
      element.style.width = `${width}px`;
      element.style.height = `${height}px`;
    }
    const context = element.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    measure(context);
    const [ink, faint, soft, line] = ["ink", "faint", "soft", "line"].map(themed);
    for (const head of layout.headsBetween(top, top + height)) {
      context.fillStyle = line;
      if (head.y > 0) context.fillRect(12, head.y - top + 1, width - 24, 1);
      context.fillStyle = soft;
      context.fillText(head.text, 12, head.y - top + LINE - 4);
    }
    for (const box of layout.boxesBetween(top, top + height)) {
      const token = tokens[box.index];
      const back = token.sampled ? scale.of(token) : null;
      if (back) {
        context.fillStyle = back;
        context.fillRect(box.x, box.y - top + 2, Math.max(2, box.width - 1), LINE - 4);
      }
      if (token.staleness !== null && token.stale) {
        context.fillStyle = themed("bad");
        context.fillRect(box.x, box.y - top + LINE - 3, Math.max(2, box.width - 1), 1.5);
      }
      if (box.index === picked || box.index === hover.current) {
        context.strokeStyle = ink;
        context.lineWidth = box.index === picked ? 2 : 1;
        context.strokeRect(box.x - 0.5, box.y - top + 1.5, box.width, LINE - 3);
      }
      context.fillStyle = token.sampled ? ink : faint;
      context.fillText(box.text, box.x + 1, box.y - top + LINE - 7);
    }
    if (layout.height - top < height * (1 + AHEAD)) more();
  };
  useEffect(draw, [layout, scale, picked, theme]);

  useEffect(() => {
    if (!layout) return;
    const box = picked !== null ? layout.boxes[picked] : null;
    const head = box === null ? layout.heads.find((one) => one.turn === turn) : null;
    const y = box?.y ?? head?.y;
    const element = scroll.current;
    if (y !== undefined && (y < element.scrollTop || y > element.scrollTop + element.clientHeight - 2 * LINE)) element.scrollTop = Math.max(0, y - (box ? element.clientHeight / 2 : 0));
  }, [turn, picked, layout !== null, layout?.boxes[picked ?? -1] !== undefined]);

  const found = (event) => {
    const bounds = canvas.current.getBoundingClientRect();
    return layout?.at(event.clientX - bounds.left, event.clientY - bounds.top + scroll.current.scrollTop) ?? null;
  };
  const point = (event) => {
    const index = found(event);
    if (index === hover.current) return;
    hover.current = index;
    draw();
    const frame = scroll.current.parentElement.getBoundingClientRect();
    onHover(index === null ? null : {
      index,
      at: {
        x: Math.max(8, Math.min(event.clientX - frame.left + 14, frame.width - 290)),
        y: event.clientY - frame.top + (event.clientY - frame.top > frame.height - 330 ? -Math.min(330, event.clientY - frame.top - 4) : 18),
      },
    });
  };
  const leave = () => {
    hover.current = null;
    onHover(null);
    draw();
  };
  const press = (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1 };
    const from = picked ?? 0;
    let next = null;
    if (event.key in moves) next = from + moves[event.key];
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = layout?.beside(from, event.key === "ArrowDown" ? 1 : -1);
    else if (event.key === "Escape") return onPick(null);
    if (next === null || next < 0 || next >= tokens.length) return undefined;
    event.preventDefault();
    event.stopPropagation();
    return onPick(next);
  };
  return html`<div class="scroll" ref=${scroll} tabindex="0" role="application" aria-label="Tokens; arrow keys move from token to token" onScroll=${draw} onKeyDown=${press}>
    <div style=${{ height: `${layout?.height ?? 0}px` }}><canvas ref=${canvas} onPointerMove=${point} onPointerLeave=${leave} onClick=${(event) => onPick(found(event))}></canvas></div></div>`;
}

function useTokens(run, episode, leaf, folded) {
  const [parts, setParts] = useState([]);
  const [state, setState] = useState({ next: 0, loaded: 0, turns: 0, problem: null, error: null, version: null, bound: null });
  const busy = useRef(false);
  const more = () => {
    if (busy.current || state.next === null || state.error) return;
    busy.current = true;
    read(runPath(run, "episodes", episode, "tokens") + query({ leaf, start: state.next })).then(
      (found) => {
        busy.current = false;
        setParts((old) => [...old, ...found.parts]);
        setState({ next: found.next, loaded: found.next ?? found.turns, turns: found.turns, problem: found.problem, recordProblem: found.record_problem, error: null, version: found.batch_version, bound: found.max_staleness });
      },
      (error) => {
        busy.current = false;
        setState((old) => ({ ...old, error }));
      },
    );
  };
  useEffect(more, []);
  const made = useMemo(() => flattened(parts, state.version, state.bound, folded), [parts, folded]);
  return { ...made, state, more };
}

// What a step did with a token. Columns without any value are null.
function trainedToken(turn, place, sampled) {
  const value = (name) => turn[name]?.[place] ?? null;
  const [ratio, proximal] = [value("ratio"), value("proximal")];
  return {
    step: turn.step, version: turn.version, clipped: turn.clipped[place], proximal, ratio,
    current: value("current"), weight: value("weight"), advantage: value("advantage"), loss: value("loss"),
    loss_weight: value("loss_weight"), reference: value("reference"), value: value("value"),
    log_ratio: ratio === null ? null : Math.log(ratio), mismatch: proximal === null ? null : proximal - sampled,
  };
}

// The tokens of all parts in one list, and the heads that separate the turns.
// Of a folded prompt only the end is there.
function flattened(parts, version, bound, folded) {
  const tokens = [];
  const heads = [];
  let position = 0;
  for (const one of parts) {
    const sampled = one.ids.length - one.prompt_tokens;
    const hidden = folded && one.prompt_tokens > PROMPT_END * 1.5 ? one.prompt_tokens - PROMPT_END : 0;
    heads.push({ at: tokens.length, turn: one.turn, text: `turn ${one.number + 1}: ${number(one.prompt_tokens)} prompt + ${number(sampled)} sampled tokens${hidden ? `; the first ${number(hidden)} are folded` : ""}` });
    one.ids.forEach((id, index) => {
      position += 1;
      if (index < hidden) return;
      const place = index - one.prompt_tokens;
      const isSampled = place >= 0;
      const age = isSampled && version !== null && one.versions[place] !== null ? version - one.versions[place] : null;
      tokens.push({
        turnId: one.turn, place, id, text: one.texts ? one.texts[index] : `${id} `, turn: one.number + 1, position: position - 1, sampled: isSampled,
        logprob: isSampled ? one.logprobs[place] : null, version: isSampled ? one.versions[place] : null,
        staleness: age, stale: age !== null && bound !== null && age > bound,
        mask: isSampled ? (one.trained ? one.trained.untrained ?? one.trained.states[place] ?? "not recorded" : one.mask) : "prompt",
        trained: isSampled && one.trained ? trainedToken(one.trained, place, one.logprobs[place]) : null,
      });
    });
  }
  return { tokens, heads };
}
