"""Reinforcement learning for LLM agents that keep their own code.

The names below are the public names of the package. Importing it imports neither torch nor numpy nor an HTTP
client; a name that needs one is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Imported at once: the decorator has the name of the module that defines it, and a later import of a
# submodule must not replace the decorator by the module.
from areal_agents.episode import Episode, current_key, episode
from areal_agents.lazy_imports import on_first_use
from areal_agents.version import __version__

if TYPE_CHECKING:
    from areal_agents.api import Evaluation, Run, Server, evaluate, serve, train
    from areal_agents.client import AsyncClient, Client, OpenedEpisode
    from areal_agents.errors import ArealAgentsError
    from areal_agents.rollout.agents.cli.acp_agent import acp_agent

__all__ = [
    "ArealAgentsError",
    "AsyncClient",
    "Client",
    "Episode",
    "Evaluation",
    "OpenedEpisode",
    "Run",
    "Server",
    "__version__",
    "acp_agent",
    "current_key",
    "episode",
    "evaluate",
    "serve",
    "train",
]

__getattr__ = on_first_use(
    __name__,
    {
        "api": ("Evaluation", "Run", "Server", "evaluate", "serve", "train"),
        "client": ("AsyncClient", "Client", "OpenedEpisode"),
        "errors": ("ArealAgentsError",),
        "rollout.agents.cli.acp_agent": ("acp_agent",),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
