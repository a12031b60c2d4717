"""Chooses which samples share a micro-batch: whole clusters with a common prefix, cut only if they must be.

A piece is a part of the prefix forest that stays together. Adding a piece to a micro-batch that already
contains its prefix costs only the rest, so each piece goes to the micro-batch where it saves the most. The
sizes and costs are exactly those of the token trees that are laid out afterwards.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.packing.balance import balance, imbalance
from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.packing.token_tree import PrefixForest

TOLERANCE = 0.03  # rank imbalance up to which no cluster is cut for the sake of balance
# number of limits on the cost of a piece that are tried: none, the cost of a micro-batch, and its halves
LIMITS = 6
# share by which another packing must reduce the heaviest rank's cost to replace the best packing
WORTH = 0.005
Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Members with the same `above`; `node` is -1 for a sequence that ends where another continues.

    Attributes:
        tokens, cost: tokens and cost of the members, without the nodes in `above`.
        above: nodes that the members continue, which a micro-batch may already contain.
    """

    node: int
    members: tuple[int, ...]
    tokens: int
    cost: float
    above: tuple[int, ...]


def place(
    forest: PrefixForest,
    predictions: Sequence[int],
    *,
    token_budget: int,
    ranks: int,
    shape: ModelShape | None,
) -> list[list[int]]:
    """Return the members of each micro-batch. The number of micro-batches is a multiple of `ranks`;
    [r::ranks] are those of rank r.

    Args:
        predictions: number of trained tokens of each sequence.
        shape: the model shape that costs are computed from; without it a token costs 1.

    Returns:
        Lists, some of which are empty if there is too little work for every rank. The largest come first.
    """
    costs = _Costs(forest, predictions, shape)
    best: tuple[float, float, list[list[int]]] | None = None  # the heaviest rank, imbalance, members
    limit, before = math.inf, 0
    for _ in range(LIMITS):
        pieces = costs.pieces(token_budget, limit)
        if len(pieces) == before:
            break  # nothing is left to cut
        for even in (True, False):
            bins, sums = _fill(costs, pieces, token_budget, ranks, even=even)
            by_rank = balance(sums, ranks)
            loads = [sum(sums[i] for i in mine) for mine in by_rank]
            if best is None or max(loads) < best[0] * (1 - WORTH):
                order = [i for turn in zip(*by_rank, strict=True) for i in turn]
                best = max(loads), imbalance(loads), [bins[i] for i in order]
        assert best is not None
        if best[1] <= TOLERANCE:
            break
        before, limit = len(pieces), min(limit, 2 * sum(sums) / len(sums)) / 2
    assert best is not None
    return best[2]


class _Costs:
    """Tokens and costs of the forest's nodes, and the pieces into which it can be cut."""

    def __init__(self, forest: PrefixForest, predictions: Sequence[int], shape: ModelShape | None) -> None:
        self.nodes, self.leaves = forest.nodes, forest.leaves
        starts = np.array([node.start for node in self.nodes], np.float64)
        ends = np.array([node.end for node in self.nodes], np.float64)
        self.tokens: Counts = ends - starts
        self.costs: Counts = self.tokens.copy()
        self.heads: Counts = np.zeros(len(self.leaves))  # cost of the logits, per sequence
        if shape is not None:
            pairs = (ends * (ends + 1) - starts * (starts + 1)) / 2
            self.costs = shape.per_row * self.tokens + shape.per_pair * pairs
            self.heads = shape.per_prediction * np.array(predictions, np.float64)
        self.by_leaf = sorted(range(len(self.leaves)), key=self.leaves.__getitem__)
        self.sorted_leaves = [self.leaves[i] for i in self.by_leaf]
        self.children: dict[int, list[int]] = {}
        self.after = list(range(1, len(self.nodes) + 1))  # end of each node's subtree
        for index in reversed(range(len(self.nodes))):
            parent = self.nodes[index].parent
            self.children.setdefault(parent, []).append(index)
            if parent >= 0:
                self.after[parent] = max(self.after[parent], self.after[index])

    def pieces(self, token_budget: int, limit: float) -> list[_Piece]:
        """Return whole clusters, but cut those above the budget or above a cost of `limit` if they can be
        cut."""
        done = []
        pending = [self._piece(root, ()) for root in self.children.get(-1, [])]
        while pending:
            piece = pending.pop()
            above = sum(self.tokens[node] for node in piece.above)
            large = above + piece.tokens > token_budget or piece.cost > limit
            if large and len(piece.members) > 1:
                pending += self.open(piece)
            else:
                done.append(piece)
        return done

    def open(self, piece: _Piece) -> list[_Piece]:
        """The parts below a piece's first node."""
        above = (*piece.above, piece.node)
        ending = [i for i in piece.members if self.leaves[i] == piece.node]
        parts = [self._piece(child, above) for child in self.children.get(piece.node, [])]
        return parts + [_Piece(-1, (i,), 0, float(self.heads[i]), above) for i in ending]

    def _piece(self, node: int, above: tuple[int, ...]) -> _Piece:
        end = self.after[node]
        low, high = bisect_left(self.sorted_leaves, node), bisect_left(self.sorted_leaves, end)
        members = tuple(self.by_leaf[low:high])
        cost = self.costs[node:end].sum() + self.heads[list(members)].sum()
        return _Piece(node, members, int(self.tokens[node:end].sum()), float(cost), above)


def _fill(
    costs: _Costs, pieces: Sequence[_Piece], token_budget: int, ranks: int, *, even: bool
) -> tuple[list[list[int]], list[float]]:
    """Return the members and the cost of the fewest micro-batches, a multiple of `ranks`, into which the
    pieces are found to fit.

    Args:
        even: whether micro-batches should cost about the same, rather than share as much as possible.
    """
    least = sum(piece.tokens for piece in pieces)
    count = ranks * max(1, math.ceil(least / (token_budget * ranks)))
    while True:
        bins = _Bins(costs, pieces, token_budget, count, even=even)
        left = bins.place(pieces)
        if left == 0:
            return bins.used(ranks)
        count += ranks * math.ceil(left / (token_budget * ranks))


class _Bins:
    """Fills micro-batches: the costliest pieces come first, and each goes where it adds the least cost."""

    def __init__(
        self, costs: _Costs, pieces: Sequence[_Piece], token_budget: int, count: int, *, even: bool
    ) -> None:
        self.costs, self.budget = costs, token_budget
        self.members: list[list[int]] = [[] for _ in range(count)]
        self.tokens, self.sums = np.zeros(count), np.zeros(count)
        self.missing: dict[int, Counts] = {}  # per node above a piece: 1 for each bin that lacks the node
        shared = {node for piece in pieces for node in piece.above}
        total = sum(piece.cost for piece in pieces) + sum(costs.costs[node] for node in shared)
        self.fair = 1.01 * total / count if even else math.inf

    def place(self, pieces: Sequence[_Piece]) -> int:
        """Place the pieces, cutting those that fit nowhere whole; return the number of tokens that fit
        nowhere."""
        queue = [(-piece.cost, number, piece) for number, piece in enumerate(pieces)]
        heapq.heapify(queue)
        number, left = len(queue), 0
        while queue:
            _, _, piece = heapq.heappop(queue)
            if self._add(piece):
                continue
            if len(piece.members) == 1:
                left += max(1, piece.tokens)
                continue
            for part in self.costs.open(piece):
                heapq.heappush(queue, (-part.cost, number, part))
                number += 1
        return left

    def _add(self, piece: _Piece) -> bool:
        """Add a piece to a micro-batch in which it fits; return False if there is none.

        Of the micro-batches that stay within their fair share of the cost, it goes to the one that already
        contains most of its prefix, then to the cheapest; if there are none, to the one that is cheapest with
        it.
        """
        tokens, cost = np.full(len(self.sums), piece.tokens, float), np.full(len(self.sums), piece.cost)
        for node in piece.above:
            missing = self.missing.setdefault(node, np.ones(len(self.sums)))
            tokens += missing * self.costs.tokens[node]
            cost += missing * self.costs.costs[node]
        fits = self.tokens + tokens <= self.budget
        if not fits.any():
            return False
        after = self.sums + cost
        fair = fits & (after <= self.fair)
        if fair.any():
            at = int(np.lexsort((self.sums, np.where(fair, tokens, np.inf)))[0])
        else:
            at = int(np.where(fits, after, np.inf).argmin())
        self.members[at] += piece.members
        self.tokens[at] += tokens[at]
        self.sums[at] = after[at]
        for node in piece.above:
            self.missing[node][at] = 0.0
        return True

    def used(self, ranks: int) -> tuple[list[list[int]], list[float]]:
        """Return the members and cost of the micro-batches, without the empty ones that no rank needs."""
        order = sorted(range(len(self.members)), key=lambda i: -self.sums[i])
        filled = sum(map(bool, self.members))
        order = order[: ranks * math.ceil(filled / ranks)]
        return [self.members[i] for i in order], [float(self.sums[i]) for i in order]
