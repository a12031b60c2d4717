"""Curves of a run: columns of its metrics by step, and its evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard


def names_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics that are numbers; those of an object are "name/key"."""
    names: dict[str, None] = {}
    for row in (*rows[:1], *rows[len(rows) // 2 : len(rows) // 2 + 1], *rows[-1:]):
        for name, value in row.items():
            if name in ("step", "time"):
                continue
            if isinstance(value, Mapping):
                names.update((f"{name}/{key}", None) for key in value)
            elif value is None or _is_number(value):
                names[name] = None
    return list(names)


def columns_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[float | None]]:
    """Return the values of some metrics, one for each row; None where there is none."""
    return {name: [_value(row, name) for row in rows] for name in names}


def _value(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None and "/" in name:
        outer, _, key = name.partition("/")
        inner = row.get(outer)
        value = inner.get(key) if isinstance(inner, Mapping) else None
    return value if _is_number(value) and math.isfinite(value) else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
