"""Splits lists of ids into chunks that one statement can bind: SQLite accepts 32,766 variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_MOST_IDS = 10_000


def chunks(ids: Iterable[str]) -> Iterator[list[str]]:
    """Yield the ids in order, in lists that fit into one `column.in_(…)`; nothing if there are no ids."""
    whole = list(ids)
    for start in range(0, len(whole), _MOST_IDS):
        yield whole[start : start + _MOST_IDS]
