// Numbers, times and durations as the page writes them.
const none = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return none;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size !== 0 && size < 10 ** -digits) return value.toExponential(1);
  if (size >= 10000) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 100 ? 1 : digits);
}

export const score = (value) => (value === null || value === undefined ? none : value.toFixed(3));

export function share(value) {
  return value === null || value === undefined ? none : (100 * value).toFixed(value !== 0 && value < 0.01 ? 2 : 1) + " %";
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return none;
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (seconds < 100) return seconds.toFixed(1) + " s";
  if (seconds < 6000) return Math.round(seconds / 60) + " min";
  return (seconds / 3600).toFixed(1) + " h";
}

export function when(seconds) {
  if (!seconds) return none;
  const date = new Date(seconds * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function clock(seconds) {
  const date = new Date(seconds * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function range(low, high) {
  if (low === null || low === undefined) return none;
  return low === high ? `${low}` : `${low}–${high}`;
}

// The first readable line of a task's input, which is JSON that may have been cut.
export function preview(text) {
  const found = /"(?:question|prompt|problem|instruction|q|query|input|text)":\s*"((?:[^"\\]|\\.)*)/.exec(text ?? "");
  if (!found) return text === "{}" ? "" : text ?? "";
  try {
    return JSON.parse(`"${found[1].replace(/\\$/, "")}"`);
  } catch {
    return found[1];
  }
}

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
