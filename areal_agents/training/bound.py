"""The hard bound on staleness as one batch meets it: which groups may be taken now, and which are refused."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.staleness import (
    EpisodeTokens,
    episode_tokens,
    is_stale,
    leaves_in_time,
    stale_share_by_length,
)
from areal_agents.core.rollout import OnStale, RolloutGroup
from areal_agents.store import Store
from areal_agents.training.lineage import Lineage
from areal_agents.training.vetting import Refused


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound for the batch of one version, and what it has cost so far; the rules: `algorithms.staleness`.

    Attributes:
        version: the trainer's when the batch begins.
        max_staleness: η; None: no bound.
        groups: in a batch.
        lineage: what versions count as; groups are judged with their versions counted so already.
    """

    version: int
    max_staleness: int | None
    on_stale: OnStale
    groups: int
    lineage: Lineage
    _tokens: list[EpisodeTokens] = field(default_factory=list)

    def allows(self, store: Store, count: int) -> bool:
        """Whether the `count` oldest complete groups may be taken now.

        With `wait` only if each group that they leave behind can still be trained in time, or if they are
        the oldest of all: then waiting longer would help nobody, so this can hold the trainer for no longer
        than its oldest groups take to complete or to be given up.
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
        """Why the bound forbids a group, None if it does not."""
        drop = self.on_stale == "drop"
        if not is_stale(group, algorithm, version=self.version, max_staleness=self.max_staleness, drop=drop):
            return None
        self._count(group, algorithm, dropped=True)
        return Refused("stale", f"more than {self.max_staleness} versions old at version {self.version}")

    def note_taken(self, group: RolloutGroup, algorithm: AlgorithmConfig) -> None:
        """Count what is masked of a group that is trained."""
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
        """See `stale_share_by_length`, of the groups taken and of those refused."""
        return stale_share_by_length(self._tokens)
