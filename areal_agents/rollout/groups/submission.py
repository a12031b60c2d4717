"""Chooses the next training group, and whether it may begin: gate, steps left, end of the data."""

from __future__ import annotations

import logging
from collections.abc import Callable

from areal_agents.core.rollout import Task
from areal_agents.errors import DataError
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.data import TaskSource
from areal_agents.rollout.groups.gate import admissible_groups
from areal_agents.store import Store

logger = logging.getLogger(__name__)


class Submission:
    """Hands out the tasks of new groups, one at a time.

    Args:
        source: of the tasks; those that the store has groups of are not handed out again.
        steps: of the run; how many groups it needs follows.
        lack: what the run lacks to take more on; no group is submitted while it lacks anything.
    """

    def __init__(
        self,
        *,
        store: Store,
        source: TaskSource,
        config: RolloutConfig,
        steps: int,
        lack: Callable[[], str | None],
    ) -> None:
        self._store = store
        self._config = config
        self._steps = steps
        self._lack = lack
        self._lacked = False
        self._tasks = source.stream(set(store.task_ids_started("train")))
        self._exhausted = False

    def next(self, *, unregistered: int) -> tuple[Task, int] | None:
        """The task of one more group and its epoch, if one may be submitted and there is one.

        Args:
            unregistered: groups that are begun and have no row in the store yet.
        """
        if not admissible_groups(
            submitted=self._submitted() + unregistered,
            groups=self._config.groups,
            max_staleness=self._config.max_staleness,
            needed=self._needed(),
        ):
            return None
        if self._lacks():
            return None
        task, epoch = next(self._tasks, (None, 0))
        if task is None:
            self._exhausted = True
            return None
        return task, epoch

    def held_back(self) -> frozenset[str]:
        """The groups no place of which may be filled now: before each are as many as the gate admits.

        After a resume the groups of the lost steps come back before those that were begun since, and a
        smaller batch leaves some over. What these sample now would be too old when their turn comes.
        """
        if self._config.max_staleness is None:
            return frozenset()
        admitted = (self._config.max_staleness + 1) * self._config.groups
        if self._submitted() <= admitted:
            return frozenset()
        return frozenset(group.id for group in self._store.untrained_groups()[admitted:])

    def check_data(self) -> None:
        """DataError if the data has ended and what is left makes no batch; for when no group is under way."""
        if not self._exhausted:
            return
        counts = self._store.group_counts("train")
        left = counts["pending"] + counts["complete"] + counts["leased"]
        if left < self._config.groups and counts["trained"] + left < self._steps * self._config.groups:
            raise DataError(
                f"the data ended: {counts['trained']} groups were trained and {counts['dropped']} dropped, "
                f"and the {left} left make no batch of {self._config.groups}; raise data.epochs"
            )

    def _submitted(self) -> int:
        """Groups in the store that are neither trained nor dropped."""
        counts = self._store.group_counts("train")
        return counts["pending"] + counts["complete"] + counts["leased"]

    def _lacks(self) -> bool:
        """Whether the run lacks something; the log says when that begins and ends."""
        lack = self._lack()
        if lack is not None and not self._lacked:
            logger.error("%s", lack)
        elif lack is None and self._lacked:
            logger.info("groups are submitted again")
        self._lacked = lack is not None
        return self._lacked

    def _needed(self) -> int:
        """How many groups the steps to come train on; looked up only where nothing else is the bound."""
        if self._config.max_staleness is not None:
            return 0
        return (self._steps - newest_step(self._store)) * self._config.groups


def newest_step(store: Store) -> int:
    """The step of the newest version."""
    latest = store.latest_version()
    return latest.step if latest is not None else 0
