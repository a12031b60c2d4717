"""Sequences merged at their common prefixes, so that a shared token goes through the model once.

The tree is laid out depth first: the tokens of a segment are contiguous, and so are the tokens of
everything that continues it. A token attends to its own segment causally and to all of every
segment above it, which is exactly what it would attend to in its own sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that one set of sequences shares.

    Attributes:
        start, end: its rows in the layout.
        subtree_end: end of the rows of everything that continues it; `end` if nothing does.
        position: position of its first token in its sequences.
    """

    start: int
    end: int
    subtree_end: int
    position: int


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

    @property
    def saved_tokens(self) -> int:
        """Tokens that do not go through the model again because they are shared."""
        return sum(map(len, self.rows)) - len(self.token_ids)


def prefix_order(sequences: Sequence[npt.ArrayLike]) -> list[int]:
    """Indices of the sequences in lexicographic order: neighbours share the most."""
    return sorted(range(len(sequences)), key=lambda i: np.asarray(sequences[i], ">u4").tobytes())


def common_prefix(left: npt.NDArray, right: npt.NDArray) -> int:
    """Number of leading elements that two arrays share."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if differs.size else length


def build_tree(sequences: Sequence[npt.NDArray], *, min_saved: int | None = 64) -> TokenTree:
    """Merge sequences where that saves at least `min_saved` tokens for one more segment.

    Args:
        sequences: token ids, each [L] with L ≥ 1.
        min_saved: None merges nothing: every sequence is a segment of its own.

    Raises:
        ValueError: an empty sequence.
    """
    if any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("an empty sequence cannot be packed")
    builder = _Builder(sequences, min_saved)
    if sequences:
        builder.add(0, len(sequences), depth=0, above=())
    return builder.tree()


class _Builder:
    """Walks the sorted sequences depth first and emits segments."""

    def __init__(self, sequences: Sequence[npt.NDArray], min_saved: int | None) -> None:
        self.order = prefix_order(sequences)
        self.sorted = [np.asarray(sequences[i], np.int64) for i in self.order]
        pairs = zip(self.sorted, self.sorted[1:], strict=False)
        self.shared = [0, *(common_prefix(left, right) for left, right in pairs)]  # with the one before
        self.min_saved = min_saved
        self.segments: list[Segment] = []
        self.parts: list[npt.NDArray[np.int64]] = []
        self.rows: dict[int, Rows] = {}
        self.size = 0

    def add(self, low: int, high: int, *, depth: int, above: tuple[Rows, ...]) -> None:
        """Emit sequences [low, high), whose first `depth` tokens are in the rows `above`."""
        if high - low == 1:
            _, rows = self._emit(self.sorted[low][depth:], depth)
            self.rows[self.order[low]] = np.concatenate([*above, rows])
            return
        shared = min(self.shared[low + 1 : high])
        saves = self.min_saved is not None and (high - low - 1) * (shared - depth) >= max(1, self.min_saved)
        index, below = None, depth
        if saves:
            index, rows = self._emit(self.sorted[low][depth:shared], depth)
            below, above = shared, (*above, rows)
        cuts = [low, *(i for i in range(low + 1, high) if self.shared[i] == shared), high]
        for left, right in zip(cuts, cuts[1:], strict=False):
            self.add(left, right, depth=below, above=above)
        if index is not None:
            segment = self.segments[index]
            self.segments[index] = Segment(segment.start, segment.end, self.size, segment.position)

    def _emit(self, tokens: npt.NDArray[np.int64], position: int) -> tuple[int | None, Rows]:
        start, end = self.size, self.size + len(tokens)
        if len(tokens):  # none: the sequence is the whole prefix of another
            self.segments.append(Segment(start, end, end, position))
            self.parts.append(tokens)
            self.size = end
        return len(self.segments) - 1, np.arange(start, end)

    def tree(self) -> TokenTree:
        empty = np.empty(0, np.int64)
        positions = [np.arange(s.position, s.position + s.end - s.start) for s in self.segments]
        return TokenTree(
            token_ids=np.concatenate([empty, *self.parts]),
            position_ids=np.concatenate([empty, *positions]),
            segments=tuple(self.segments),
            rows=tuple(self.rows[i] for i in range(len(self.order))),
        )
