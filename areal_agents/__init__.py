"""Reinforcement learning for LLM agents that keep their own code.

The names below are the public names of the package. Importing it imports neither torch nor numpy nor an HTTP
client; a name that needs one is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Imported at once: the decorator has the name of the module that defines it, and a later import of a
# submodule must not replace the decorator by the module.
from areal_agents.episode import Episode, current_key, episode

if TYPE_CHECKING:
    from areal_agents.api import Evaluation, Run, Server, evaluate, serve, train
    from areal_agents.client import AsyncClient, Client, OpenedEpisode
    from areal_agents.errors import ArealAgentsError

__version__ = "0.1.0"

__all__ = [
    "ArealAgentsError",
    "AsyncClient",
    "Client",
    "Episode",
    "Evaluation",
    "OpenedEpisode",
    "Run",
    "Server",
    "current_key",
    "episode",
    "evaluate",
    "serve",
    "train",
]

_HOME = {
    "ArealAgentsError": "areal_agents.errors",
    "AsyncClient": "areal_agents.client",
    "Client": "areal_agents.client",
    "Evaluation": "areal_agents.api",
    "OpenedEpisode": "areal_agents.client",
    "Run": "areal_agents.api",
    "Server": "areal_agents.api",
    "evaluate": "areal_agents.api",
    "serve": "areal_agents.api",
    "train": "areal_agents.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
