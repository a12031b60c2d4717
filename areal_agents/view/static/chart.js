// A chart of several curves over one another; a click on a point opens what the point is made of.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import uPlot from "./vendor/uplot.js";
import { number } from "./format.js";
import { colour, useThemeTick } from "./theme.js";

const HEIGHT = 190;
const FONT = "11px system-ui, sans-serif";
const NEAR = 60; // pixels

// `curves`: [{name, colour, x, y, open(index)}]; `x` ascends. `points` draws the points of few values.
export function Chart({ title, curves, xName, xFormat = number, yFormat = number, close, points = false }) {
  const box = useRef(null);
  const [at, setAt] = useState(null);
  const theme = useThemeTick();
  const shown = curves.filter((curve) => curve.y.some((value) => value !== null));
  const identity = shown.map((curve) => curve.name + curve.colour).join("\0") + xName + theme;
  const plot = useRef(null);
  const latest = useRef(shown);
  latest.current = shown;

  useEffect(() => {
    if (!box.current || !shown.length) return undefined;
    const made = new uPlot(options(), joined(latest.current), box.current);
    plot.current = made;
    const resize = new ResizeObserver(([entry]) => made.setSize({ width: entry.contentRect.width, height: HEIGHT }));
    resize.observe(box.current);
    return () => {
      resize.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [identity]);

  useEffect(() => {
    plot.current?.setData(joined(latest.current));
  }, [shown.map((curve) => `${curve.x.length} ${curve.x.at(-1)} ${curve.y.at(-1)}`).join()]);

  function options() {
    const axis = { stroke: colour("soft"), font: FONT, grid: { stroke: colour("line-soft"), width: 1 }, ticks: { show: false } };
    return {
      width: box.current.clientWidth,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      cursor: { points: { size: 8 }, focus: { prox: NEAR }, drag: { x: true, y: false } },
      focus: { alpha: 0.35 },
      scales: { x: { time: false } },
      axes: [
        { ...axis, values: (_, splits) => splits.map((value) => xFormat(value)), size: 30 },
        { ...axis, values: (_, splits) => splits.map((value) => number(value, 2)), size: 54 },
      ],
      series: [
        {},
        ...latest.current.map((curve) => ({
          label: curve.name,
          stroke: curve.colour,
          width: 1.6,
          spanGaps: true,
          points: { show: points || curve.x.length < 2, size: 6, fill: curve.colour },
        })),
      ],
      hooks: { setCursor: [(self) => setAt(self.cursor.idx ?? null)] },
    };
  }

  function open(event) {
    const made = plot.current;
    if (!made || made.cursor.left < 0) return;
    const bounds = made.over.getBoundingClientRect();
    const [left, top] = [event.clientX - bounds.left, event.clientY - bounds.top];
    let best = null;
    latest.current.forEach((curve) => {
      curve.x.forEach((x, index) => {
        if (curve.y[index] === null) return;
        const away = Math.hypot(made.valToPos(x, "x") - left, made.valToPos(curve.y[index], "y") - top);
        if (away <= NEAR && (best === null || away < best.away)) best = { away, curve, index };
      });
    });
    best?.curve.open?.(best.index);
  }

  const x = at === null || !plot.current ? null : plot.current.data[0][at];
  const read = x === null ? (curve) => curve.y.findLast((value) => value !== null) : (curve) => curve.y[curve.x.indexOf(x)];
  return html`<section class="chart" aria-label=${title}>
    <h2>${title}</h2>
    ${close && html`<button class="quiet close" onClick=${close} aria-label=${`Remove the chart of ${title}`}>✕</button>`}
    <div class="read"><span>${x === null ? "last" : `${xName} ${xFormat(x)}`}</span>${shown.map((curve) => {
      const value = read(curve);
      return value !== undefined && html`<span title=${curve.name}><i class="dot" style=${{ background: curve.colour }}></i>${yFormat(value)}</span>`;
    })}</div>
    ${shown.length ? html`<div class="plot" ref=${box} onClick=${open}></div>` : html`<div class="none">no values</div>`}
  </section>`;
}

function joined(curves) {
  if (curves.length === 1) return [curves[0].x, curves[0].y];
  return uPlot.join(curves.map((curve) => [curve.x, curve.y]));
}
