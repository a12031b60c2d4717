"""Episodes, groups, leases and versions in one database; proxy and trainer meet only here."""

from areal_agents.store.config import StoreConfig
from areal_agents.store.episodes import SealedStatus
from areal_agents.store.errors import Conflict, NotFound, NoTurn
from areal_agents.store.rewards import DEFAULT_REWARD_NAME
from areal_agents.store.rows import (
    EpisodeRow,
    EpisodeState,
    EpisodeSummary,
    NewEpisode,
    OpenEpisode,
    OpenGroup,
    VersionRow,
)
from areal_agents.store.store import Store

__all__ = [
    "DEFAULT_REWARD_NAME",
    "Conflict",
    "EpisodeRow",
    "EpisodeState",
    "EpisodeSummary",
    "NewEpisode",
    "NoTurn",
    "NotFound",
    "OpenEpisode",
    "OpenGroup",
    "SealedStatus",
    "Store",
    "StoreConfig",
    "VersionRow",
]
