"""Tasks that are only seeds, as games have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.errors import TaskEnvironmentError

_HELD_OUT = 1 << 30  # the first held-out seed is this far from the first of training


class SeededTasks:
    """The tasks of a line with the options size, held_out and seed.

    Raises:
        TaskEnvironmentError: an option is out of range.
    """

    def __init__(self, line: EnvironmentLine, options: Mapping[str, int]) -> None:
        self._counts: Mapping[Split, int] = {"train": options["size"], "eval": options["held_out"]}
        self._first: Mapping[Split, int] = {"train": options["seed"], "eval": options["seed"] + _HELD_OUT}
        if min(self._counts.values()) < 1 or options["seed"] < 0 or options["size"] > _HELD_OUT:
            raise TaskEnvironmentError(
                f"{line.text!r}: size must be from 1 to 2**30, held_out at least 1, and seed at least 0"
            )

    def of(self, split: Split) -> list[dict[str, Any]]:
        """Return the tasks of a split."""
        first = self._first[split]
        return [{"id": f"{split}-{index}", "seed": first + index} for index in range(self._counts[split])]
