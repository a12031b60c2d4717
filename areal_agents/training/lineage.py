"""How old a version is, in trained batches, where the run was resumed between it and now.

A resume goes back to the step of its checkpoint and publishes that step's weights under a number above all
there ever were. The versions of the steps that were lost lie between, but no batch that counts: a token of
the version of step s is S - s batches old for the trainer that stands at step S, whichever life sampled it.
The lost steps are trained again on the same groups, so these are as old then as they were the first time.
A lost version whose step is yet to come again, which a batch of another size may meet, is as far off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.trajectory import Turn
from areal_agents.store import Store


@dataclass(frozen=True, slots=True)
class Lineage:
    """Versions as this life counts them: the trainer's version less their age. Those of this life, and any
    that is unknown, stay as they are.

    Attributes:
        moved: what versions of earlier lives count as.
    """

    moved: Mapping[int, int]

    @classmethod
    def of(cls, store: Store, version: int) -> Lineage:
        """As the trainer at `version` sees it; no version counts as one that is yet to come."""
        return cls(
            {
                earlier: version - abs(lag)
                for earlier, lag in store.steps_behind(version).items()
                if earlier < version and version - lag != earlier
            }
        )

    def counted(self, version: int) -> int:
        """What a version counts as."""
        return self.moved.get(version, version)

    def oldest_within(self, version: int, max_staleness: int | None) -> int:
        """The smallest version from which on every one up to `version` is within the bound, if any."""
        if max_staleness is None:
            return 0
        oldest = version
        while oldest > 0 and version - self.counted(oldest - 1) <= max_staleness:
            oldest -= 1
        return oldest

    def of_group(self, group: RolloutGroup) -> RolloutGroup:
        """A group with every token's version as it counts."""
        if not self.moved:
            return group
        rollouts = []
        for rollout in group.rollouts:
            turns = tuple(self._turn(turn) for turn in rollout.episode.turns)
            rollouts.append(replace(rollout, episode=replace(rollout.episode, turns=turns)))
        return replace(group, rollouts=tuple(rollouts))

    def _turn(self, turn: Turn) -> Turn:
        drawn = turn.completion.versions.tolist()
        versions = np.array([self.counted(version) for version in drawn], np.int32)
        return replace(turn, completion=replace(turn.completion, versions=versions))
