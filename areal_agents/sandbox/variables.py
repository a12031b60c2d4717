"""Variables of a command that the program in between, which starts the command, must not heed.

Variables come from tasks of other people. The client of Docker heeds DOCKER_HOST, and every program of this
machine LD_PRELOAD, so they pass it under other names, and a shell in the sandbox names them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PREFIX = "AREAL_AGENTS_GIVEN_"


def renamed(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the names under which they pass.

    What is no name for a shell keeps its own; no program heeds it.
    """
    return {_passes_as(name): value for name, value in variables.items()}


def named_back(names: Iterable[str]) -> str:
    """Return shell commands that give the variables that were `renamed` their own names again."""
    hidden = [name for name in names if _passes_as(name) != name]
    given = "".join(f'export {name}="${_PREFIX}{name}"; ' for name in hidden)
    return given + "".join(f"unset {_PREFIX}{name}; " for name in hidden)


def _passes_as(name: str) -> str:
    return _PREFIX + name if name.isascii() and name.isidentifier() else name
