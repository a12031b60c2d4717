// Colour scales that people with every kind of colour vision can read: Okabe and Ito's colours for categories,
// viridis for an order, one hue for an amount, and blue to orange for what has a middle.
export const CATEGORIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7f7f7f"];

const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const AMOUNT = [213, 94, 0];
const BELOW = [0, 114, 178];
const ABOVE = [213, 94, 0];

const css = ([red, green, blue], alpha) => `rgb(${Math.round(red)} ${Math.round(green)} ${Math.round(blue)} / ${alpha.toFixed(3)})`;
const limited = (value) => Math.min(1, Math.max(0, value));

export function ordered(position) {
  const at = limited(position) * (VIRIDIS.length - 1);
  const index = Math.min(VIRIDIS.length - 2, Math.floor(at));
  const mixed = VIRIDIS[index].map((low, i) => low + (VIRIDIS[index + 1][i] - low) * (at - index));
  return css(mixed, 0.5);
}

export const amount = (position) => css(AMOUNT, 0.75 * limited(position) ** 0.7);

export function diverging(position) {
  const size = Math.min(1, Math.abs(position));
  return css(position < 0 ? BELOW : ABOVE, 0.75 * size ** 0.7);
}

export const ramp = (scale, from, to) =>
  `linear-gradient(to right, ${Array.from({ length: 9 }, (_, i) => scale(from + ((to - from) * i) / 8)).join(", ")})`;

const MASKS = {
  trained: css(BELOW, 0.45), "not trained yet": css([86, 180, 233], 0.35), stale: css([230, 159, 0], 0.5), rejected: css([204, 121, 167], 0.55),
  evaluation: css([127, 127, 127], 0.25), "no group": css([127, 127, 127], 0.25),
  imported: css([127, 127, 127], 0.25),
};

const LOGPROB = 6; // nats; less is shown in the same colour
const ADVANTAGE = 2;
const RATIO = 0.3; // of the logarithm

// The ways to colour tokens. `of` returns a CSS colour of a sampled token, or null for none.
export function scaleOf(name, tokens) {
  if (name === "version") {
    const versions = tokens.filter((token) => token.sampled && token.version !== null).map((token) => token.version);
    if (!versions.length) return { of: () => null, legend: { items: [] } };
    const low = versions.reduce((a, b) => Math.min(a, b), Infinity);
    const high = versions.reduce((a, b) => Math.max(a, b), -Infinity);
    const place = (version) => (high > low ? (version - low) / (high - low) : 0.5);
    return {
      of: (token) => (token.version === null ? null : ordered(place(token.version))),
      legend: { ramp: ramp(ordered, high > low ? 0 : 0.5, high > low ? 1 : 0.5), low: `version ${low}`, high: high > low ? `${high}` : "" },
    };
  }
  if (name === "mask") {
    const kinds = [...new Set(tokens.filter((token) => token.sampled).map((token) => token.mask))];
    const colour = (mask) => MASKS[mask] ?? css([213, 94, 0], 0.4);
    return { of: (token) => colour(token.mask), legend: { items: kinds.map((mask) => [colour(mask), mask]) } };
  }
  if (name === "logprob") {
    return {
      of: (token) => (token.logprob === null ? null : amount(-token.logprob / LOGPROB)), // imported tokens have none
      legend: { ramp: ramp(amount, 0, 1), low: "logprob 0 (certain)", high: `−${LOGPROB} or less (surprising)` },
    };
  }
  const [limit, value, low, high] = {
    advantage: [ADVANTAGE, (token) => token.trained?.advantage, `advantage −${ADVANTAGE}`, `+${ADVANTAGE}`],
    ratio: [RATIO, (token) => token.trained?.log_ratio, "ratio 0.74", "1.35"],
    mismatch: [0.1, (token) => token.trained?.mismatch, "sampler less certain", "trainer less certain"],
  }[name];
  return {
    of: (token) => (value(token) === undefined || value(token) === null ? null : diverging(value(token) / limit)),
    legend: { ramp: ramp(diverging, -1, 1), low, high },
  };
}
