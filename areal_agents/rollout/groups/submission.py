"""Chooses the next training group to submit, as the gate, shortages and the end of the data allow.

Several processes choose alike, each by its own sampler, which is told of the groups that others begin. The
store then admits a group for one of them (`Store.begin_group`), so together they begin the groups that one
process would begin, in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from areal_agents.core.rollout import Task, task_and_epoch, training_group_id
from areal_agents.errors import DataError
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.data import TaskMixture, TaskSource
from areal_agents.rollout.groups.gate import admissible_groups
from areal_agents.rollout.samplers import sampler_of
from areal_agents.store import Store

logger = logging.getLogger(__name__)


class Submission:
    """Yields the tasks of new groups, one at a time.

    Args:
        source: the tasks; those that the store has groups of are not submitted again.
        steps: the number of steps of the run, from which the number of groups follows.
        shortage: returns what the run is short of, or None; no group is submitted during a shortage.
        is_shared: whether other processes begin groups of these tasks.
    """

    def __init__(
        self,
        *,
        store: Store,
        source: TaskSource | TaskMixture,
        config: RolloutConfig,
        steps: int,
        shortage: Callable[[], str | None],
        is_shared: bool = False,
    ) -> None:
        self._store = store
        self._config = config
        self._steps = steps
        self._shortage = shortage
        self._was_short = False
        started = store.task_ids_started("train")
        self._sampler = sampler_of(source, started, store.group_scores)
        self._exhausted = False
        self._is_shared = is_shared
        self._known = {training_group_id(*of) for of in started} if is_shared else set()
        self._read_to = 0  # the number of the last group in the store that the sampler knows of
        self._returned: tuple[Task, int] | None = None

    def next(self, *, unregistered: int) -> tuple[Task, int] | None:
        """Return the task of one more group and its epoch, or None if none may be submitted or is left.

        Args:
            unregistered: the number of groups that are begun and have no row in the store yet.
        """
        if not self._admissible(self._submitted() + unregistered, self._needed()):
            return None
        if self._is_short():
            return None
        if self._is_shared:
            self._note_others()
        found, self._returned = self._returned or self._sampler.next(), None
        self._exhausted = found is None
        if found is not None and self._is_shared:
            self._known.add(training_group_id(found[0].id, found[1]))
        return found

    def put_back(self, chosen: tuple[Task, int]) -> None:
        """Return a task for which the store admitted no group; it is the next one, unless others begin it."""
        self._returned = chosen
        self._known.discard(training_group_id(chosen[0].id, chosen[1]))

    def bound(self) -> tuple[int, int | None]:
        """Return the most groups that may be submitted and not trained, and the step of that number.

        The step is None if the number does not depend on it.
        """
        if self._config.max_staleness is not None:
            return self._admissible(0, 0), None
        step = newest_step(self._store)
        return self._admissible(0, (self._steps - step) * self._config.groups), step

    def held_back(self) -> frozenset[str]:
        """Return the groups that must start no episode now, because the gate admits only groups before them.

        After a resume, the groups of the lost steps come back before those that were begun since, and a
        smaller batch size leaves too many groups. What these sample now would be too old when it is trained.
        """
        if self._config.max_staleness is None:
            return frozenset()
        admitted = (self._config.max_staleness + 1) * self._config.groups
        if self._submitted() <= admitted:
            return frozenset()
        return frozenset(group.id for group in self._store.untrained_groups()[admitted:])

    def check_data(self) -> None:
        """Raise DataError if the data has ended and too few groups are left for a batch.

        Call this only while no group is in progress.
        """
        if not self._exhausted:
            return
        counts = self._store.group_counts("train")
        left = counts["pending"] + counts["complete"] + counts["leased"]
        if left < self._config.groups and counts["trained"] + left < self._steps * self._config.groups:
            raise DataError(
                f"the data ended: {counts['trained']} groups were trained and {counts['dropped']} dropped, "
                f"and the {left} left are too few for a batch of {self._config.groups}; raise data.epochs"
            )

    def _admissible(self, submitted: int, needed: int) -> int:
        return admissible_groups(
            submitted=submitted,
            groups=self._config.groups,
            max_staleness=self._config.max_staleness,
            needed=needed,
        )

    def _note_others(self) -> None:
        """Tell the sampler of the groups that other processes have begun since the last call."""
        for seq, group_id in self._store.groups_begun(self._read_to):
            self._read_to = seq
            if group_id in self._known:
                continue
            self._known.add(group_id)
            if self._returned is not None and group_id == training_group_id(
                self._returned[0].id, self._returned[1]
            ):
                self._returned = None  # the sampler knows of it, because it chose it
            else:
                self._sampler.note_begun(*task_and_epoch(group_id))

    def _submitted(self) -> int:
        """Return the number of groups in the store that are neither trained nor dropped."""
        counts = self._store.group_counts("train")
        return counts["pending"] + counts["complete"] + counts["leased"]

    def _is_short(self) -> bool:
        """Whether the run is short of a resource; logs when a shortage begins and ends."""
        shortage = self._shortage()
        if shortage is not None and not self._was_short:
            logger.error("%s", shortage)
        elif shortage is None and self._was_short:
            logger.info("the shortage has ended; groups are submitted again")
        self._was_short = shortage is not None
        return self._was_short

    def _needed(self) -> int:
        """Return the number of groups for the remaining steps, or 0 if the staleness bound decides."""
        if self._config.max_staleness is not None:
            return 0
        return (self._steps - newest_step(self._store)) * self._config.groups


def newest_step(store: Store) -> int:
    """Return the step of the newest version."""
    latest = store.latest_version()
    return latest.step if latest is not None else 0
