"""Relative paths in a tree, resolved against the folder that they were written for."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PATH_KEYS = (
    ("model",), ("agent",), ("ablation",), ("run_dir",), ("data", "path"), ("data", "episodes"),
    ("eval", "data", "path"), ("trainer", "critic_model"), ("trainer", "reference_model"),
    ("trainer", "teacher_model"),
    ("engine", "python"), ("store", "retain", "export"), ("trainer", "publish", "folder"),
)  # fmt: skip
_ALWAYS_PATHS = ("model", "run_dir", "critic_model", "reference_model", "teacher_model", "export", "folder")


def with_absolute_paths(tree: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """A copy of `tree` in which whatever names a file does so from anywhere."""
    out: dict[str, Any] = copy.deepcopy(dict(tree))
    for *parents, leaf in _PATH_KEYS:
        node: Any = out
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(leaf), str):
            node[leaf] = _absolute(node[leaf], base, always=leaf in _ALWAYS_PATHS)
    return out


def _absolute(value: str, base: Path, *, always: bool) -> str:
    """`value` resolved against `base` if it names a file there (a function may follow a colon)."""
    file, colon, function = value.partition(":") if ".py:" in value else (value, "", "")
    candidate = Path(os.path.normpath(base / file))  # links stay: the Python of an environment is one
    if value and (always or candidate.exists()):
        return f"{candidate}{colon}{function}"
    return value
