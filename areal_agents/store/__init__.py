"""The durable store: episodes, groups, leases and versions in one database, which proxy and trainer share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_agents.lazy_imports import on_first_use

if TYPE_CHECKING:
    from areal_agents.store.config import RetainConfig, StoreConfig
    from areal_agents.store.episodes import SealedStatus
    from areal_agents.store.errors import Conflict, NotFound, NoTurn, OwnedElsewhere, SessionTaken
    from areal_agents.store.retention_job import Retention
    from areal_agents.store.rewards import DEFAULT_REWARD_NAME
    from areal_agents.store.rows import (
        Activity,
        Admission,
        EpisodeRow,
        EpisodeState,
        EpisodeSummary,
        GroupHistory,
        GroupUse,
        NewEpisode,
        NewGroup,
        OpenEpisode,
        OpenGroup,
        ScoredConversation,
        ServedVersions,
        TaskGroup,
        TrainedStep,
        UntrainedGroup,
        VersionRow,
        WaitingGroup,
        opened_row,
    )
    from areal_agents.store.store import Store
    from areal_agents.store.urls import store_path

__all__ = [
    "DEFAULT_REWARD_NAME",
    "Activity",
    "Admission",
    "Conflict",
    "EpisodeRow",
    "EpisodeState",
    "EpisodeSummary",
    "GroupHistory",
    "GroupUse",
    "NewEpisode",
    "NewGroup",
    "NoTurn",
    "NotFound",
    "OpenEpisode",
    "OpenGroup",
    "OwnedElsewhere",
    "RetainConfig",
    "Retention",
    "ScoredConversation",
    "SealedStatus",
    "ServedVersions",
    "SessionTaken",
    "Store",
    "StoreConfig",
    "TaskGroup",
    "TrainedStep",
    "VersionRow",
    "UntrainedGroup",
    "WaitingGroup",
    "opened_row",
    "store_path",
]

# Every process reads the configuration of the store, and few of them open one.
__getattr__ = on_first_use(
    __name__,
    {
        "config": (
            "RetainConfig",
            "StoreConfig",
        ),
        "episodes": ("SealedStatus",),
        "errors": (
            "Conflict",
            "NotFound",
            "NoTurn",
            "OwnedElsewhere",
            "SessionTaken",
        ),
        "retention_job": ("Retention",),
        "rewards": ("DEFAULT_REWARD_NAME",),
        "rows": (
            "Activity",
            "Admission",
            "EpisodeRow",
            "EpisodeState",
            "EpisodeSummary",
            "GroupHistory",
            "GroupUse",
            "NewEpisode",
            "NewGroup",
            "OpenEpisode",
            "OpenGroup",
            "ScoredConversation",
            "ServedVersions",
            "TaskGroup",
            "TrainedStep",
            "UntrainedGroup",
            "VersionRow",
            "WaitingGroup",
            "opened_row",
        ),
        "store": ("Store",),
        "urls": ("store_path",),
    },
)
