"""Merges sequences at their common prefixes, so that a shared token goes through the model once.

The tree is laid out depth first: the tokens of a segment are contiguous, and so are the tokens of its whole
subtree. A token attends causally to its own segment and fully to every segment above it, which is exactly
what it would attend to in its own sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens shared by one set of sequences.

    Attributes:
        start, end: its rows in the layout.
        subtree_end: end of the rows of its subtree; `end` if nothing continues the segment.
        position: position of its first token in its sequences.
    """

    start: int
    end: int
    subtree_end: int
    position: int

    @property
    def pairs(self) -> int:
        """Number of rows that its rows attend to, themselves included, summed over its rows."""
        length = self.end - self.start
        return length * self.position + length * (length + 1) // 2


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """The merged sequences.

    Attributes:
        token_ids: [T]; position_ids: [T] position of each token in its sequences.
        segments: depth first, by start.
        rows: per sequence [L] the row of each of its tokens.
    """

    token_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    segments: tuple[Segment, ...]
    rows: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens [start, end) of the sequence `source`, which all sequences below share.

    Attributes:
        parent: index of the node that it continues; -1 for a root. Parents come first.
    """

    parent: int
    source: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class PrefixForest:
    """How sequences share prefixes; micro-batches are laid out from parts of it.

    Attributes:
        sequences: [L] each.
        nodes: depth first.
        leaves: per sequence the node that it ends in.
    """

    sequences: tuple[npt.NDArray[np.int64], ...]
    nodes: tuple[Node, ...]
    leaves: tuple[int, ...]

    def path(self, sequence: int) -> list[int]:
        """The nodes whose tokens make up a sequence, from the root down."""
        path, node = [], self.leaves[sequence]
        while node >= 0:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def layout(self, members: Sequence[int]) -> TokenTree:
        """The token tree of some of the sequences; `rows` are in the order of `members`."""
        paths = [self.path(member) for member in members]
        used = sorted({node for path in paths for node in path})
        lengths = np.array([self.nodes[node].end - self.nodes[node].start for node in used], np.int64)
        ends = np.cumsum(lengths)
        firsts = dict(zip(used, (ends - lengths).tolist(), strict=True))
        rows = []
        for path in paths:
            spans = [(firsts[n], firsts[n] + self.nodes[n].end - self.nodes[n].start) for n in path]
            rows.append(np.concatenate([np.arange(start, end) for start, end in spans]))
        parts = [self.sequences[n.source][n.start : n.end] for n in map(self.nodes.__getitem__, used)]
        positions = [np.arange(n.start, n.end) for n in map(self.nodes.__getitem__, used)]
        empty = np.empty(0, np.int64)
        return TokenTree(
            token_ids=np.concatenate([empty, *parts]),
            position_ids=np.concatenate([empty, *positions]),
            segments=_segments(self.nodes, used, {path[-1] for path in paths}, firsts),
            rows=tuple(rows),
        )


def _segments(
    nodes: Sequence[Node], used: Sequence[int], ending: Collection[int], firsts: dict[int, int]
) -> tuple[Segment, ...]:
    """Create the segments of the used nodes; a node that only one other node continues forms one segment with
    it."""
    children: dict[int, int] = {}
    for index in used:
        children[nodes[index].parent] = children.get(nodes[index].parent, 0) + 1
    last = {index: firsts[index] + nodes[index].end - nodes[index].start for index in used}
    ends = dict(last)
    for index in reversed(used):  # children before parents
        parent = nodes[index].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    made: list[Segment] = []
    for index in used:
        parent = nodes[index].parent
        if parent >= 0 and children[parent] == 1 and parent not in ending:
            above = made[-1]  # the parent, or the node that the parent was joined to
            made[-1] = Segment(above.start, last[index], ends[index], above.position)
        else:
            made.append(Segment(firsts[index], last[index], ends[index], nodes[index].start))
    return tuple(made)


def prefix_order(sequences: Sequence[npt.ArrayLike]) -> list[int]:
    """Indices of the sequences in lexicographic order, so that neighbours share the longest prefixes."""
    return sorted(range(len(sequences)), key=lambda i: np.asarray(sequences[i], ">u4").tobytes())


def common_prefix(left: npt.NDArray, right: npt.NDArray) -> int:
    """Number of leading elements that two arrays share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def build_forest(
    sequences: Sequence[npt.NDArray], *, min_saved: int | None = 64, keys: Sequence[npt.NDArray] | None = None
) -> PrefixForest:
    """Merge sequences if that saves at least `min_saved` tokens for each merged sequence.

    Args:
        sequences: token ids, each [L] with L ≥ 1.
        min_saved: None merges nothing, so every sequence is a separate node.
        keys: values to compare instead of the token ids, each [L] in [0, 2³²). Tokens whose ids do not
            identify their content, such as those of images, have their own keys.

    Raises:
        ValueError: a sequence is empty.
    """
    if any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("every sequence must have at least one token, got an empty one")
    compared = sequences if keys is None else keys
    order = prefix_order(compared)
    ordered = [compared[i] for i in order]
    shared = [0, *(common_prefix(a, b) for a, b in zip(ordered, ordered[1:], strict=False))]
    nodes: list[Node] = []
    leaves = [-1] * len(order)
    # runs [low, high) of `order` whose first `depth` tokens are those of `parent` and above
    pending = [(0, len(order), 0, -1)] if order else []
    while pending:
        low, high, depth, parent = pending.pop()
        source = order[low]
        if high - low == 1:
            if len(sequences[source]) > depth:
                nodes.append(Node(parent, source, depth, len(sequences[source])))
                parent = len(nodes) - 1
            leaves[source] = parent  # no node is needed: the whole sequence is a prefix of another
            continue
        common = min(shared[low + 1 : high])
        if min_saved is not None and common - depth >= max(1, min_saved):
            nodes.append(Node(parent, source, depth, common))
            depth, parent = common, len(nodes) - 1
        cuts = [low, *(i for i in range(low + 1, high) if shared[i] == common), high]
        runs = zip(cuts, cuts[1:], strict=False)
        pending += reversed([(left, right, depth, parent) for left, right in runs])
    arrays = tuple(np.asarray(sequence, np.int64) for sequence in sequences)
    return PrefixForest(arrays, tuple(nodes), tuple(leaves))


def build_tree(sequences: Sequence[npt.NDArray], *, min_saved: int | None = 64) -> TokenTree:
    """Merge all sequences into one tree; see `build_forest`."""
    return build_forest(sequences, min_saved=min_saved).layout(range(len(sequences)))
