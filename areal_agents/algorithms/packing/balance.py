"""Distributes costs over ranks: each rank gets the same number of costs, with sums made as equal as
differencing achieves."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the indices of the costs for each rank: the same number for each, with the largest first.

    Karmarkar–Karp differencing for several sets (Karmarkar and Karp 1982), in the form that keeps
    the counts equal (Michiels, Korst, Aarts, van Leeuwen 2003): the sorted costs are dealt in
    tuples of one per rank; the two partitions with the largest spread are merged, largest sum onto
    smallest, until one partition is left.

    Raises:
        ValueError: the number of costs is not a multiple of the ranks.
    """
    if ranks < 1 or len(costs) % ranks:
        raise ValueError(
            f"the number of micro-batches must be a multiple of the ranks, got {len(costs)} for {ranks} ranks"
        )
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    if not order:
        return [[] for _ in range(ranks)]
    # a partition: (sum, indices) per rank, largest sum first; the counter breaks ties
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for count, start in enumerate(range(0, len(order), ranks)):
        sets = [(costs[i], [i]) for i in order[start : start + ranks]]
        heap.append((sets[-1][0] - sets[0][0], count, sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, count, right = heapq.heappop(heap)
        merged = [(a + b, i + j) for (a, i), (b, j) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], count, merged))
    return [sorted(indices, key=lambda i: (-costs[i], i)) for _, indices in heap[0][2]]


def imbalance(sums: Sequence[float]) -> float:
    """Relative excess of the heaviest rank over the mean: max/mean − 1; 0 without ranks or costs."""
    total = sum(sums)
    return max(sums) * len(sums) / total - 1 if total else 0.0
