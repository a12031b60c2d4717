// The turns of an episode as a forest: which turn continues which, and how the branches are drawn.

// Adds a number, the children and a lane to each turn. The first child of a turn stays in its lane.
export function forestOf(turns) {
  const byId = new Map();
  const nodes = turns.map((turn, index) => {
    const node = { ...turn, number: index + 1, index, children: [] };
    byId.set(turn.id, node);
    return node;
  });
  let lanes = 0;
  for (const node of nodes) {
    const parent = node.parent === null ? null : byId.get(node.parent);
    node.above = parent ?? null;
    node.lane = parent && parent.children.length === 0 ? parent.lane : lanes++;
    parent?.children.push(node);
  }
  return { nodes, byId, lanes };
}

export function pathTo(forest, id) {
  const path = [];
  for (let node = forest.byId.get(id); node; node = node.above) path.unshift(node);
  return path;
}

// The last turn of the branch that goes on from a turn: always the newest child.
export function leafOf(node) {
  let found = node;
  while (found.children.length) found = found.children.at(-1);
  return found;
}

export const leaves = (forest) => forest.nodes.filter((node) => !node.children.length);
