// Where each token is on the canvas. Lines have one height, so what is in sight is found by division.
export const LINE = 24;
const FONT = '13px ui-monospace, "SF Mono", "JetBrains Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';
const LEFT = 12;
const LONGEST = 200; // characters that are drawn of one token
const ruler = document.createElement("canvas").getContext("2d");

export function measure(context) {
  context.font = FONT;
  context.textBaseline = "alphabetic";
}

function widthOf(text) {
  measure(ruler);
  const single = ruler.measureText("0").width;
  return /^[\x20-\x7e]*$/.test(text) ? single * text.length : ruler.measureText(text).width;
}

// Line feeds and tabs are drawn as signs; a token with no text of its own, a part of a character, as a dot.
const visible = (text) => (text === "" ? "·" : text.slice(0, LONGEST).replaceAll("\n", "↵").replaceAll("\t", "→").replace(/[\x00-\x1f\x7f]/g, "␦"));

export function layOut(tokens, heads, width) {
  const boxes = [];
  const lines = []; // the index of the first token of each line, null of a line of a head
  const placed = [];
  const starts = new Map(heads.map((head) => [head.at, head]));
  let x = LEFT;
  let line = -1;
  const breakLine = (first) => {
    line += 1;
    lines[line] = first;
    x = LEFT;
  };
  tokens.forEach((token, index) => {
    const head = starts.get(index);
    if (head) {
      breakLine(null);
      placed.push({ ...head, y: line * LINE });
      breakLine(index);
    }
    const text = visible(token.text);
    const size = widthOf(text) + 2;
    if (x + size > width - LEFT && x > LEFT) breakLine(index);
    boxes.push({ index, text, x, y: line * LINE, width: Math.min(size, width - 2 * LEFT), line });
    x += size;
    if (token.text.endsWith("\n") && !starts.has(index + 1)) breakLine(index + 1);
  });
  const between = (top, bottom) => {
    let first = Math.max(0, Math.floor(top / LINE));
    while (first < lines.length && lines[first] === null) first += 1;
    const found = [];
    for (let i = lines[first] ?? boxes.length; i < boxes.length && boxes[i].y < bottom; i += 1) found.push(boxes[i]);
    return found;
  };
  const at = (px, py) => {
    const first = lines[Math.floor(py / LINE)];
    if (first === null || first === undefined) return null;
    for (let i = first; i < boxes.length && boxes[i].line === boxes[first].line; i += 1) {
      if (px >= boxes[i].x && px < boxes[i].x + boxes[i].width) return i;
    }
    return null;
  };
  const beside = (index, by) => {
    const from = boxes[index];
    if (!from) return null;
    for (let to = from.line + by; to >= 0 && to < lines.length; to += by) {
      const hit = at(from.x + from.width / 2, to * LINE + 1);
      if (hit !== null) return hit;
      if (lines[to] !== null && boxes[lines[to]]) {
        let last = lines[to];
        while (boxes[last + 1]?.line === to) last += 1;
        return last;
      }
    }
    return null;
  };
  return {
    boxes, heads: placed, height: (line + 2) * LINE, at, beside,
    boxesBetween: between,
    headsBetween: (top, bottom) => placed.filter((head) => head.y + 2 * LINE > top && head.y < bottom),
  };
}
