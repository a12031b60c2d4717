// What the processes of a run did when, on one canvas: drag to move, wheel or + and - to zoom, click for a step.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { runPath, useData } from "./api.js";
import { clock, duration, number, score } from "./format.js";
import { useKeys } from "./keys.js";
import { Problem } from "./parts.js";
import { episodesLink, go, stepLink } from "./route.js";
import { colour, useThemeTick } from "./theme.js";

const LANES = [
  ["open", "Open episodes", 70], ["evaluations", "Evaluations", 28], ["trainer", "Trainer", 34], ["swaps", "Swaps", 28], ["marks", "Deaths, failures", 28],
];
const LEFT = 118;
const AXIS = 26;
const GAP = 8;
const PARTS = { wait: "#b9c0c7", train: "#0072b2", publish: "#e69f00", evaluation: "#cc79a7", open: "#56b4e9", swap: "#009e73", bad: "#d55e00" };
const TICKS_S = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800];

export function Timeline({ run, tick }) {
  const { data, error } = useData(runPath(run, "timeline"), tick);
  const canvas = useRef(null);
  const [view, setView] = useState(null); // [from, to] in seconds, null: all
  const [hint, setHint] = useState(null);
  const [width, setWidth] = useState(0);
  const theme = useThemeTick();
  const drag = useRef(null);
  const whole = data ? [data.start, Math.max(data.end, data.start + 1)] : [0, 1];
  const [from, to] = view ?? whole;
  const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT);
  const time = (px) => from + ((px - LEFT) / (width - LEFT)) * (to - from);
  const zoom = (factor, middle = (from + to) / 2) => {
    const next = [middle - (middle - from) * factor, middle + (to - middle) * factor];
    setView(next[1] - next[0] >= whole[1] - whole[0] ? null : next);
  };
  useKeys({ "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => setView(null) });

  useEffect(() => {
    const element = canvas.current;
    if (!element) return undefined;
    const resize = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    resize.observe(element.parentElement);
    const wheel = (event) => {
      if (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
      event.preventDefault();
      zoomAt.current(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX);
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => {
      resize.disconnect();
      element.removeEventListener("wheel", wheel);
    };
  }, [data !== null]);
  const zoomAt = useRef(null);
  zoomAt.current = (factor, px) => zoom(factor, time(px));

  const height = LANES.reduce((sum, [, , size]) => sum + size + GAP, AXIS);
  const items = data ? placed(data) : [];
  useEffect(() => {
    if (data && width) drawAll(canvas.current, { data, items, x, from, to, width, height });
  }, [data, width, from, to, theme]);

  if (error && !data) return html`<${Problem} error=${error} />`;
  if (!data) return null;
  if (!data.end) return html`<div class="empty"><h2>Nothing has happened yet</h2><p>The timeline begins with the first episode.</p></div>`;
  const under = (event) => {
    const bounds = canvas.current.getBoundingClientRect();
    const [px, py] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const hit = items.filter((item) => py >= item.y && py < item.y + item.height && px >= x(item.from) - 3 && px <= x(item.to) + 3);
    return { px, py, item: hit.sort((a, b) => a.to - a.from - (b.to - b.from))[0] ?? null };
  };
  const move = (event) => {
    if (drag.current) {
      const by = ((drag.current.px - event.clientX) / (width - LEFT)) * (to - from);
      if (Math.abs(event.clientX - drag.current.start) > 4) drag.current.moved = true;
      drag.current.px = event.clientX;
      if (view) setView([from + by, to + by]);
    }
    const { px, py, item } = under(event);
    setHint(px > LEFT ? { px, py, text: item?.text ?? null, at: time(px) } : null);
  };
  const release = (event) => {
    const moved = drag.current?.moved;
    drag.current = null;
    if (!moved) under(event).item?.open?.(run);
  };
  return html`
    <${Problem} error=${error} />
    <div class="row toolbar"><div class="legend plain">${[["wait", "waits for groups"], ["train", "trains"], ["publish", "publishes"], ["swap", "pause for a swap"], ["evaluation", "evaluation"], ["bad", "death or failure"]].map(([name, text]) => html`<span class="item"><i class="swatch" style=${{ background: PARTS[name] }}></i>${text}</span>`)}</div>
      <span class="grow"></span><button onClick=${() => zoom(0.5)} aria-label="Zoom in">+</button><button onClick=${() => zoom(2)} aria-label="Zoom out">−</button><button disabled=${!view} onClick=${() => setView(null)}>All</button></div>
    <div class="timeline card flush"><canvas ref=${canvas} style=${{ height: `${height}px` }} role="img" aria-label=${`Timeline of ${data.steps.length} steps over ${duration(data.end - data.start)}`}
      onPointerDown=${(event) => { drag.current = { px: event.clientX, start: event.clientX, moved: false }; event.target.setPointerCapture(event.pointerId); }}
      onPointerMove=${move} onPointerUp=${release} onPointerLeave=${() => setHint(null)}></canvas>
      ${hint && html`<div class="hover" style=${{ left: `${Math.min(hint.px + 14, width - 280)}px`, top: `${hint.py + 14}px` }}><div class="soft">${clock(hint.at)}, after ${duration(hint.at - data.start)}</div>${hint.text?.map((line) => html`<div>${line}</div>`)}</div>`}</div>
    <${Idle} data=${data} />`;
}

function Idle({ data }) {
  const sum = (name) => data.steps.reduce((total, step) => total + (step[name] ?? 0), 0);
  const all = sum("step_s");
  if (!all) return null;
  const idle = data.steps.map((step) => step.rollout_idle).filter((value) => value !== null);
  const rows = [["Trainer waits", sum("wait_s") / all], ["Trainer trains", sum("train_s") / all], ["Publishes", sum("publish_s") / all], ["Generation pauses", sum("pause_s") / all]];
  if (idle.length) rows.push(["Generation idle", idle.reduce((a, b) => a + b, 0) / idle.length]);
  return html`<dl class="facts">${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${(100 * value).toFixed(1)} %</dd></div>`)}</dl>`;
}

function laneOf(name) {
  let y = 0;
  for (const [lane, , size] of LANES) {
    if (lane === name) return { y, height: size };
    y += size + GAP;
  }
  throw new Error(`there is no lane ${name}`);
}

// Everything on the timeline but the area of open episodes, with its place and what is said of it.
function placed(data) {
  const items = [];
  const add = (lane, from, to, colour, text, open) => items.push({ ...laneOf(lane), lane, from, to, colour, text, open });
  for (const step of data.steps) {
    const open = (run) => go(stepLink(run, step.step));
    const start = step.time - step.step_s;
    const head = [`step ${step.step}: reward ${score(step.reward_mean)}, ${number(step.sampled_tokens)} sampled tokens`];
    const publish = step.time - (step.publish_s ?? 0);
    add("trainer", start, start + step.wait_s, PARTS.wait, [...head, `waited for groups ${duration(step.wait_s)}`], open);
    add("trainer", start + step.wait_s, publish, PARTS.train, [...head, `trained ${duration(step.train_s)}`], open);
    add("trainer", publish, step.time, PARTS.publish, [...head, `published version ${step.version} in ${duration(step.publish_s)}`], open);
    add("swaps", step.time - (step.pause_s ?? 0), step.time, PARTS.swap, [`version ${step.version}`, `generation paused ${duration(step.pause_s)}`], open);
  }
  for (const one of data.evaluations) {
    add("evaluations", one.began, one.ended ?? one.began, PARTS.evaluation, [`evaluation ${one.label}: ${score(one.reward)}`, `${number(one.episodes)} episodes, ${number(one.failed)} failed`], (run) => go(episodesLink(run, { evaluation: one.label })));
  }
  for (const at of data.open_episodes?.failed ?? []) add("marks", at, at, PARTS.bad, ["an episode failed"], (run) => go(episodesLink(run, { status: "failed" })));
  for (const event of data.events) {
    const bad = event.event === "died";
    add("marks", event.time, event.time, bad ? PARTS.bad : PARTS.swap, [`${event.process} ${event.event}`, event.detail].filter(Boolean));
  }
  return items;
}

function drawAll(canvas, { data, items, x, from, to, width, height }) {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const [soft, line] = [colour("soft"), colour("line-soft")];
  const bottom = height - AXIS;
  const step = TICKS_S.find((size) => (size / (to - from)) * (width - LEFT) > 70) ?? TICKS_S.at(-1);
  for (let tick = Math.ceil((from - data.start) / step) * step; data.start + tick <= to; tick += step) {
    const px = x(data.start + tick);
    context.fillStyle = line;
    context.fillRect(px, 0, 1, bottom);
    context.fillStyle = soft;
    context.textAlign = px > width - 30 ? "right" : "center";
    context.fillText(label(tick, step), px, bottom + AXIS / 2);
  }
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT, bottom);
  context.clip();
  drawOpen(context, data.open_episodes, x);
  for (const item of items) {
    const [left, right] = [x(item.from), x(item.to)];
    if (right < LEFT || left > width) continue;
    context.fillStyle = item.colour;
    const size = Math.max(item.from === item.to || item.lane === "swaps" ? 2 : 0.5, right - left - (right - left > 4 ? 1 : 0));
    context.fillRect(left, item.y + 3, size, item.height - 6);
  }
  context.restore();
  context.textAlign = "left";
  context.fillStyle = soft;
  for (const [name, text] of LANES) {
    const lane = laneOf(name);
    context.fillText(text, 12, lane.y + lane.height / 2);
  }
}

function drawOpen(context, episodes, x) {
  if (!episodes) return;
  const { start, end, counts } = episodes;
  const lane = laneOf("open");
  const most = counts.reduce((a, b) => Math.max(a, b), 1);
  const base = lane.y + lane.height;
  context.beginPath();
  context.moveTo(x(start), base);
  counts.forEach((count, i) => context.lineTo(x(start + ((i + 1) / counts.length) * (end - start)), base - (count / most) * (lane.height - 6)));
  context.lineTo(x(end), base);
  context.fillStyle = PARTS.open + "66";
  context.fill();
  context.fillStyle = colour("soft");
  context.textAlign = "left";
  context.fillText(`${number(most)} at most`, LEFT + 6, lane.y + 8);
}

function label(seconds, step) {
  if (step < 60) return `${seconds} s`;
  if (step < 3600) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(step < 7200 ? 1 : 0)} h`;
}
