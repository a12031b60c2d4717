"""What an environment is, the schemes that there are, and how one is opened."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from areal_agents.environments.line import EnvironmentLine
from areal_agents.episode import Episode
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

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float | None:
        """Play one episode of a task, or of a row of the user's data, and return its reward."""
        ...

    async def close(self) -> None:
        """Release what the environment holds."""
        ...


@dataclass(frozen=True, slots=True)
class Scheme:
    """An adapter.

    Attributes:
        module: the module whose function `open` takes an EnvironmentLine and returns an Environment.
        package: the import name of the package that it needs; "": none.
        requirement: what pip installs for it.
        rewards: whether `play` returns the reward; otherwise the configuration's reward function gives it.
        takes_data: whether its tasks may be rows of the user's data.
    """

    module: str
    package: str = ""
    requirement: str = ""
    rewards: bool = True
    takes_data: bool = False


SCHEMES: Mapping[str, Scheme] = {
    "reasoning-gym": Scheme("reasoning_gym", "reasoning_gym", "reasoning-gym"),
    "tools": Scheme("tool_class", takes_data=True),
    "textarena": Scheme("textarena", "textarena", "textarena"),
    "gymnasium": Scheme("gymnasium", "gymnasium", "'gymnasium[toy-text]'"),
    "mcp": Scheme("mcp_server", "mcp.client", "'mcp>=2'", rewards=False, takes_data=True),
}


def scheme_of(line: EnvironmentLine) -> Scheme:
    """Return the scheme of a line. Raises TaskEnvironmentError if there is none of this name."""
    if line.scheme not in SCHEMES:
        raise TaskEnvironmentError(
            f"there is no environment scheme {line.scheme!r} ({line.text!r}); there are {', '.join(SCHEMES)}"
        )
    return SCHEMES[line.scheme]


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
    adapter = importlib.import_module(f"areal_agents.environments.{scheme.module}")
    return cast(Environment, adapter.open(line))
