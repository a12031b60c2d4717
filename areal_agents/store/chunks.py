"""Splits ids into chunks that one SQL statement can bind: SQLite allows 32,766 variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_MOST_IDS = 10_000


def chunks(ids: Iterable[str]) -> Iterator[list[str]]:
    """The ids in order, in lists that `column.in_(…)` can take; nothing for no ids."""
    whole = list(ids)
    for start in range(0, len(whole), _MOST_IDS):
        yield whole[start : start + _MOST_IDS]
