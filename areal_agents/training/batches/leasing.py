"""Builds the batch of a step: the first rank leases groups from the store.

Groups are leased, prepared, and assembled to a batch, in which their samples are checked. A group that cannot
be trained on (a reward that is not a number, misaligned arrays, a sample longer than a micro-batch) is
dropped with its reason, and another one is leased in its place; the other groups are not affected. The gate
counts rows, so a dropped group frees its share of the gate immediately.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.ordering import ordered_groups
from areal_agents.algorithms.replay import RecentReplay
from areal_agents.algorithms.samples import BatchReport, PreparedGroup, TrainingData, assemble_batch
from areal_agents.algorithms.staleness import StalenessReport, mask_stale
from areal_agents.core.rollout import OnStale
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.store import Store
from areal_agents.training.batches.checks import (
    Refused,
    SampleLimits,
    equal_refusal,
    prepare,
    read_groups,
    refused_samples,
)
from areal_agents.training.batches.staleness import Lineage, StalenessBound

logger = logging.getLogger(__name__)

_POLL_S = 1.0  # interval between checks for a stop while there is nothing to lease
_REFILLS = 8  # maximum number of equal groups that are replaced, in batches; further ones stay in the batch


@dataclass(frozen=True, slots=True)
class QueueReport:
    """The groups between rollout and training after a batch was taken.

    Attributes:
        groups_complete, groups_pending: number of groups that are ready, and of groups being rolled out.
        age_mean_s, age_max_s: how long the groups of the batch had been complete.
        failed_episodes: training episodes that failed since the store began.
    """

    groups_complete: int
    groups_pending: int
    age_mean_s: float
    age_max_s: float
    failed_episodes: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The batch of one step.

    Attributes:
        group_ids: the groups that are trained on for the first time, leased or recorded.
        replayed: the groups that are trained on again, each with the count of its uses, this one included.
        data: the training data of these groups. Its samples are within the staleness bound; there are none
            if the scores of every group were equal.
        staleness, queue: reports for the metrics.
        stale_groups: number of groups dropped because of their staleness while the batch was collected.
        equal_groups: number of groups dropped because all of their scores were equal.
        bad_groups: the reason, by group id, for each group dropped because it cannot be trained on.
        wait_s: how long the trainer waited for the groups.
        position: how many recorded groups were read since training began; 0 without recorded groups.
    """

    group_ids: tuple[str, ...]
    data: TrainingData
    staleness: StalenessReport
    queue: QueueReport
    stale_groups: int
    wait_s: float
    equal_groups: int = 0
    bad_groups: Mapping[str, str] = field(default_factory=dict)
    position: int = 0
    replayed: tuple[tuple[str, int], ...] = ()

    @property
    def samples(self) -> tuple[TrainingSample, ...]:
        """The samples to train on."""
        return self.data.samples

    @property
    def report(self) -> BatchReport:
        """The statistics of the groups."""
        return self.data.report


class Dropped:
    """The groups that were dropped while a batch of `groups` groups was collected, by reason."""

    def __init__(self, *, step: int, groups: int) -> None:
        self._step, self._groups = step, groups
        self.stale = self.equal = 0
        self.bad: dict[str, str] = {}

    def drop(self, store: Store, group_id: str, refused: Refused) -> bool:
        """Drop a leased group in the store. Return False and keep the group if no more equal groups may be
        replaced.

        Solved tasks must not stop training, so the number of equal groups that are replaced is limited.
        Raises the same error as `note`.
        """
        if refused.kind == "equal" and self.equal >= _REFILLS * self._groups:
            return False
        store.drop_group(group_id, refused.reason, step=self._step)
        self.note(group_id, refused)
        return True

    def note(self, group_id: str, refused: Refused) -> None:
        """Count and log a dropped group.

        Raises:
            TrainingError: the number of groups that cannot be trained on exceeds the size of the batch, and
                exceeds four.
        """
        if refused.kind == "stale":
            self.stale += 1
        elif refused.kind == "equal":
            self.equal += 1
        else:
            self.bad[group_id] = refused.reason
            logger.error("step %d: group %s is dropped: %s", self._step, group_id, refused.reason)
            if len(self.bad) > max(4, self._groups):
                raise TrainingError(
                    f"step {self._step}: {len(self.bad)} groups cannot be trained on, so the cause is "
                    f"probably elsewhere; the last was {group_id}: {refused.reason}"
                )

    def log(self) -> None:
        """Log one line for the stale groups and one for the equal groups."""
        if self.stale:
            logger.warning("step %d: dropped %d groups beyond the staleness bound", self._step, self.stale)
        if self.equal:
            logger.info(
                "step %d: dropped %d groups with equal scores and leased others", self._step, self.equal
            )


def next_batch(
    store: Store,
    algorithm: AlgorithmConfig,
    *,
    groups: int,
    step: int,
    version: int,
    max_staleness: int | None,
    limits: SampleLimits,
    timeout_s: float,
    stop: threading.Event,
    on_stale: OnStale = "mask",
    ahead: int = 0,
    held: Callable[[], bool] = lambda: False,
) -> Batch | None:
    """Lease the groups of batch `step` and build their training data; None if a stop is requested.

    Groups that cannot be trained on, that are entirely beyond the staleness bound, or (with
    `refill_equal_groups`) that have equal scores are dropped with the reason, and others are leased in their
    place. If only some tokens of a group are beyond the bound, these tokens are masked, or (with `drop`) the
    group is dropped. The oldest complete groups are always taken; with `wait` only once every group that they
    leave behind can still be trained in time, or if they are the oldest of all.

    With `ahead`, a batch is taken only while so many further groups are complete, and with `held` only while
    it returns False.

    With `replay: recent` groups that earlier batches were trained on, and whose tokens are all within the
    bound, are added; the gate does not count them, and the trainer does not wait for them.

    Raises:
        TrainingError: there were not enough complete groups within `timeout_s`, or too many groups cannot
            be trained on.
    """
    started = time.monotonic()
    dropped = Dropped(step=step, groups=groups)
    lineage = Lineage.of(store, version)
    bound = StalenessBound(version, max_staleness, on_stale, groups, lineage)
    taken: list[PreparedGroup] = []
    while True:
        while len(taken) < groups:
            ids = _lease(
                store, groups - len(taken), ahead, step=step, bound=bound, timeout_s=timeout_s, stop=stop,
                held=held,
            )  # fmt: skip
            if ids is None:
                return None
            for group_id, group in zip(ids, _prepare(store, ids, algorithm, lineage, bound), strict=True):
                if isinstance(group, Refused):
                    dropped.drop(store, group_id, group)
                else:
                    taken.append(group)
        data = assemble_batch(_ordered(taken), algorithm)
        refused = refused_samples(data, algorithm, limits=limits, version=version)
        if algorithm.refill_equal_groups:
            refused |= dict.fromkeys(
                [i for i in data.report.equal_groups if i not in refused], equal_refusal(algorithm)
            )
        replaced = {
            known.group.id
            for known in taken
            if known.group.id in refused and dropped.drop(store, known.group.id, refused[known.group.id])
        }
        if not replaced:
            break
        taken = [known for known in taken if known.group.id not in replaced]
    for known in taken:
        bound.note_taken(known.group, algorithm)
    reused: dict[tuple[str, int], PreparedGroup] = {}
    if isinstance(algorithm.replay, RecentReplay):
        reused, data = _replays(
            store, algorithm, algorithm.replay, taken, data,
            step=step, version=version, lineage=lineage, limits=limits,
            oldest=lineage.oldest_within(version, max_staleness),
        )  # fmt: skip
    dropped.log()
    wait_s = time.monotonic() - started
    fresh, staleness = mask_stale(data.samples, version=version, max_staleness=max_staleness)
    staleness = replace(staleness, share_by_length=bound.share_by_length())
    ids = [known.group.id for known in _ordered(taken)]
    return Batch(
        tuple(ids), keep_samples(data, fresh), staleness, _queue(store, ids), dropped.stale, wait_s,
        equal_groups=dropped.equal, bad_groups=dropped.bad, replayed=tuple(reused),
    )  # fmt: skip


def _prepare(
    store: Store,
    group_ids: Sequence[str],
    algorithm: AlgorithmConfig,
    lineage: Lineage,
    bound: StalenessBound | None,
) -> Iterator[PreparedGroup | Refused]:
    """The groups in the order of `group_ids`, each prepared or refused. Without a `bound`, no group is
    stale."""
    for recorded in read_groups(store, group_ids):
        if isinstance(recorded, Refused):
            yield recorded
            continue
        group = lineage.of_group(recorded)
        stale = None if bound is None else bound.refuses(group, algorithm)
        yield stale or prepare(group, algorithm)


def _replays(
    store: Store,
    algorithm: AlgorithmConfig,
    replay: RecentReplay,
    taken: Sequence[PreparedGroup],
    data: TrainingData,
    *,
    step: int,
    version: int,
    lineage: Lineage,
    limits: SampleLimits,
    oldest: int,
) -> tuple[dict[tuple[str, int], PreparedGroup], TrainingData]:
    """Lease groups that earlier batches were trained on, and add them to a batch.

    Args:
        taken, data: the other groups of the batch, and their training data.
        oldest: no token of a replayed group is of an earlier version.

    Returns:
        The added groups by id, each with the count of its uses, and the training data of the whole batch.
    """
    reused: dict[tuple[str, int], PreparedGroup] = {}
    while len(reused) < replay.replay_groups:
        missing = replay.replay_groups - len(reused)
        leased = store.lease_replays(missing, step=step, min_version=oldest, max_uses=replay.replay_uses)
        if not leased:
            break
        refused: dict[tuple[str, int], Refused] = {}
        added = _prepare(store, [group_id for group_id, _ in leased], algorithm, lineage, None)
        for lease, group in zip(leased, added, strict=True):
            if isinstance(group, Refused):
                refused[lease] = group
            else:
                reused[lease] = group
        again = dict(reused.keys())
        data = assemble_batch(_ordered([*taken, *reused.values()]), algorithm, replayed=again)
        bad = refused_samples(data, algorithm, limits=limits, version=version)
        useful = {sample.group_id for sample in data.samples}
        for lease in [*reused]:
            if lease[0] in bad or lease[0] not in useful:
                refused[lease] = bad.get(lease[0], Refused("equal", "it has nothing to train on"))
                del reused[lease]
        for (group_id, use), why in refused.items():
            store.drop_group(group_id, why.reason, step=step, use=use)
        if refused:
            again = dict(reused.keys())
            data = assemble_batch(_ordered([*taken, *reused.values()]), algorithm, replayed=again)
    return reused, data


def _ordered(groups: Iterable[PreparedGroup]) -> list[PreparedGroup]:
    """The groups in the order of `ordered_groups`."""
    by_id = {known.group.id: known for known in groups}
    return [by_id[group.id] for group in ordered_groups(known.group for known in by_id.values())]


def keep_samples(data: TrainingData, samples: Iterable[TrainingSample]) -> TrainingData:
    """`data` with only these samples; a pair is kept if each of its two episodes has a sample."""
    kept = tuple(samples)
    if not data.pairs:
        return replace(data, samples=kept)
    present = {sample.episode_id for sample in kept}
    pairs = tuple(pair for pair in data.pairs if present.issuperset(pair))
    paired = {episode_id for pair in pairs for episode_id in pair}
    return replace(data, samples=tuple(s for s in kept if s.episode_id in paired), pairs=pairs)


def _queue(store: Store, group_ids: Sequence[str]) -> QueueReport:
    counts, now = store.group_counts(), time.time()
    ended = [at or now for at in store.groups_ended_at(group_ids).values()]
    return QueueReport(
        groups_complete=counts["complete"],
        groups_pending=counts["pending"],
        age_mean_s=now - sum(ended) / len(ended),
        age_max_s=now - min(ended),
        failed_episodes=store.failed_episodes(),
    )


def _lease(
    store: Store,
    count: int,
    ahead: int,
    *,
    step: int,
    bound: StalenessBound,
    timeout_s: float,
    stop: threading.Event,
    held: Callable[[], bool],
) -> list[str] | None:
    deadline = time.monotonic() + timeout_s
    seen = None
    while not stop.is_set():
        cursor = store.cursor()
        counts = store.group_counts()
        if not any(counts.values()) and cursor != seen:  # a running evaluation has priority
            deadline = time.monotonic() + timeout_s
        seen = cursor
        enough = counts["complete"] >= count + ahead
        # counting takes no lock, whereas a lease blocks every writer
        if enough and not held() and bound.allows(store, count):
            ids = store.lease_group_ids(count, step=step)
            if ids:
                return ids
        left = deadline - time.monotonic()
        if left <= 0:
            missing = "the older groups that rollout.on_stale: wait waits for"
            needed = missing if enough else f"{count + ahead} complete groups"
            raise TrainingError(
                f"step {step} did not get {needed} within the time limit (trainer.batch_timeout_s); "
                f"the store has {counts}"
            )
        store.wait(cursor, min(_POLL_S, left))
    return None
