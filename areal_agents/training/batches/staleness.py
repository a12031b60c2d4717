"""The hard bound on staleness for one batch: which groups may be taken and which are refused.

The age of a version is counted in trained batches, also across a resume.

A resume returns to the step of its checkpoint and publishes that step's weights under a number above all
earlier ones. The versions of lost steps lie in between but do not count as batches: a token of the version of
step s is S - s batches old for the trainer at step S, whichever process run sampled it. The lost steps are
trained again on the same groups, which are then as old as they were the first time. A lost version whose step
has not been repeated yet, which a batch of another size may contain, is |S - s| batches away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.staleness import (
    EpisodeTokens,
    episode_tokens,
    is_stale,
    leaves_in_time,
    stale_share_by_length,
)
from areal_agents.core.rollout import OnStale, RolloutGroup
from areal_agents.core.trajectory import Turn
from areal_agents.store import Store
from areal_agents.training.batches.checks import Refused


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The bound for the batch of one version, and counts of what it has excluded so far.
    `algorithms.staleness` defines the rules.

    Attributes:
        version: the trainer's version when the batch begins.
        max_staleness: η; None: no bound.
        groups: the number of groups in a batch.
        lineage: maps versions to comparable ones; groups must be converted with it before they are checked.
    """

    version: int
    max_staleness: int | None
    on_stale: OnStale
    groups: int
    lineage: Lineage
    _tokens: list[EpisodeTokens] = field(default_factory=list)

    def allows(self, store: Store, count: int) -> bool:
        """Whether the `count` oldest complete groups may be taken now.

        With `wait`, they may be taken only if each group that they leave behind can still be trained in time,
        or if they are the oldest of all. In the latter case further waiting would not help, so the trainer
        never waits longer than its oldest groups take to complete or to be abandoned.
        """
        if self.on_stale != "wait":
            return True
        waiting = store.waiting_groups()
        chosen = [group for group in waiting if group.state == "complete"][:count]
        if chosen == waiting[:count]:
            return True
        left = [self.lineage.counted(group.version) for group in waiting if group not in chosen]
        return leaves_in_time(
            left, version=self.version, groups=self.groups, max_staleness=self.max_staleness
        )

    def refuses(self, group: RolloutGroup, algorithm: AlgorithmConfig) -> Refused | None:
        """Return the reason why the bound forbids a group, None if it does not."""
        drop = self.on_stale == "drop"
        if not is_stale(group, algorithm, version=self.version, max_staleness=self.max_staleness, drop=drop):
            return None
        self._count(group, algorithm, dropped=True)
        return Refused("stale", f"more than {self.max_staleness} versions old at version {self.version}")

    def note_taken(self, group: RolloutGroup, algorithm: AlgorithmConfig) -> None:
        """Count the masked tokens of a group that is trained."""
        self._count(group, algorithm, dropped=False)

    def _count(self, group: RolloutGroup, algorithm: AlgorithmConfig, *, dropped: bool) -> None:
        self._tokens.extend(
            episode_tokens(
                group,
                algorithm,
                version=self.version,
                max_staleness=self.max_staleness,
                dropped=dropped,
            )
        )

    def share_by_length(self) -> dict[str, float]:
        """Return `stale_share_by_length` of the taken and the refused groups."""
        return stale_share_by_length(self._tokens)


@dataclass(frozen=True, slots=True)
class Lineage:
    """Maps versions of earlier process runs to the numbering of this one: the trainer's version minus their
    age. Versions of this process run and unknown ones stay unchanged.

    Attributes:
        moved: the mapped versions of earlier process runs.
    """

    moved: Mapping[int, int]

    @classmethod
    def of(cls, store: Store, version: int) -> Lineage:
        """Return the mapping for the trainer at `version`; no version maps to a later one."""
        return cls.behind(version, store.steps_behind(version))

    @classmethod
    def behind(cls, version: int, lags: Mapping[int, int]) -> Lineage:
        """Return the mapping for the trainer at `version`, from `store.versions.steps_behind`."""
        return cls(
            {
                earlier: version - abs(lag)
                for earlier, lag in lags.items()
                if earlier < version and version - lag != earlier
            }
        )

    def counted(self, version: int) -> int:
        """Return the mapped version."""
        return self.moved.get(version, version)

    def oldest_within(self, version: int, max_staleness: int | None) -> int:
        """Return the smallest version such that it and all later versions up to `version` are within the
        bound, if there is one."""
        if max_staleness is None:
            return 0
        oldest = version
        while oldest > 0 and version - self.counted(oldest - 1) <= max_staleness:
            oldest -= 1
        return oldest

    def of_group(self, group: RolloutGroup) -> RolloutGroup:
        """Return a group with the mapped version of every token."""
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
