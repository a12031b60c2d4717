"""Tasks that an environment has in a list, with a part of them held out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.errors import TaskEnvironmentError

_MOST_HELD_OUT = 128  # of the default, a tenth


class ListedTasks:
    """The tasks of a line with the options size, held_out and seed.

    Held-out tasks are the ones that `held_out` names, or as many as it says, chosen by the seed; the other
    tasks are those of training, in the order of the list.

    Args:
        line: the line.
        options: its options.
        rows: all tasks, each with an `id`.

    Raises:
        TaskEnvironmentError: an option is out of range, two tasks have one id, or `held_out` names a
            task that is not in the list.
    """

    def __init__(
        self, line: EnvironmentLine, options: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        self._line = line
        ids = [str(row["id"]) for row in rows]
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise TaskEnvironmentError(f"{line.text!r} has two tasks with the id {twice!r}")
        if options["size"] < 0:
            raise TaskEnvironmentError(f"{line.text!r}: size must be at least 0, got {options['size']}")
        held_out = self._held_out(options["held_out"], options["seed"], ids)
        self._rows: Mapping[Split, list[dict[str, Any]]] = {
            "train": [dict(row) for row, name in zip(rows, ids, strict=True) if name not in held_out],
            "eval": [dict(row) for row, name in zip(rows, ids, strict=True) if name in held_out],
        }
        self._size = options["size"]

    def of(self, split: Split) -> list[dict[str, Any]]:
        """Return the tasks of a split. Raises TaskEnvironmentError if it has none."""
        rows = self._rows[split]
        if not rows and split == "eval":
            raise TaskEnvironmentError(
                f"{self._line.text!r} holds out no task; give held_out, or evaluate on nothing (eval: null)"
            )
        if not rows:
            raise TaskEnvironmentError(
                f"{self._line.text!r} leaves no task to train on; give a smaller held_out"
            )
        return rows[: self._size or None] if split == "train" else rows

    def _held_out(self, given: Any, seed: int, ids: Sequence[str]) -> set[str]:
        if given is None:
            given = 0 if len(ids) < 2 else min(_MOST_HELD_OUT, max(1, len(ids) // 10))
        if type(given) is int and given >= 0:
            return set(random.Random(seed).sample(ids, min(given, len(ids))))
        if isinstance(given, str):
            given = self._listed_in(Path(given))
        if not isinstance(given, list):
            raise TaskEnvironmentError(
                f"{self._line.text!r}: held_out must be a number, a list of ids, or a file of them, "
                f"got {given!r}"
            )
        named = {str(name) for name in given}
        if unknown := sorted(named - set(ids)):
            raise TaskEnvironmentError(
                f"{self._line.text!r} has no task {', '.join(unknown[:5])} to hold out; the first tasks are "
                f"{', '.join(ids[:3])}"
            )
        return named

    def _listed_in(self, file: Path) -> list[str]:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise TaskEnvironmentError(
                f"{self._line.text!r}: cannot read the held-out ids in {file}: {error}"
            ) from error
        return [line.strip() for line in lines if line.strip()]
