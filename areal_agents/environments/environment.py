"""What an environment is, and how one is opened."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any, Literal, Protocol, cast

from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.schemes import scheme_of
from areal_agents.episode import Episode, RewardValue
from areal_agents.errors import TaskEnvironmentError

Split = Literal["train", "eval"]


class Environment(Protocol):
    """Tasks and what plays and grades them."""

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return the tasks of a split, which the line alone decides; each has a unique `id`.

        Raises:
            TaskEnvironmentError: the environment has no tasks of its own.
        """
        ...

    async def play(self, task: Mapping[str, Any], ep: Episode) -> RewardValue | None:
        """Play one episode of a task, or of a row of the user's data, and return its reward."""
        ...

    async def close(self) -> None:
        """Release what the environment holds."""
        ...


def open_environment(line: EnvironmentLine) -> Environment:
    """Open an environment in this process.

    Raises:
        TaskEnvironmentError: there is no such scheme, its package is missing, or the line cannot be used.
    """
    scheme = scheme_of(line)
    if scheme.package:
        try:
            importlib.import_module(scheme.package)
        except ImportError as error:
            raise TaskEnvironmentError(
                f"{line.text!r} needs {scheme.requirement}, which {sys.executable} cannot import ({error}): "
                f"pip install {scheme.requirement}, or name an interpreter that has it and areal-agents: "
                f"environment: {{use: {json.dumps(line.text)}, python: /path/to/python}}"
            ) from error
    adapter = importlib.import_module(f"areal_agents.environments.adapters.{scheme.module}")
    return cast(Environment, adapter.open(line))
