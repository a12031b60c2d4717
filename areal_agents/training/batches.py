"""Batches for the trainer: leased from the store by the first rank, and the same on every rank."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import BatchReport, build_samples
from areal_agents.algorithms.staleness import StalenessReport, mask_stale, wholly_stale
from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.store import Store

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # how long a stop can go unnoticed while there is nothing to lease
_LEASE_S = 7 * 86_400.0  # one trainer holds leases, and a resume returns them: they need not run out


@dataclass(frozen=True, slots=True)
class QueueReport:
    """What stands between rollout and training, when a batch has been taken.

    Attributes:
        groups_complete, groups_pending: groups ready, and groups being rolled out.
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
    """What one step trains on.

    Attributes:
        group_ids: the leased groups.
        samples: within the staleness bound; may be empty (all groups had equal scores).
        report, staleness, queue: for the metrics.
        stale_groups: groups dropped on the way because all of their tokens were beyond the bound.
        wait_s: how long the trainer waited for the groups.
    """

    group_ids: tuple[str, ...]
    samples: tuple[TrainingSample, ...]
    report: BatchReport
    staleness: StalenessReport
    queue: QueueReport
    stale_groups: int
    wait_s: float


def next_batch(
    store: Store,
    algorithm: AlgorithmConfig,
    *,
    groups: int,
    step: int,
    version: int,
    max_staleness: int,
    timeout_s: float,
    stop: threading.Event,
) -> Batch | None:
    """Lease the groups of batch `step` and make samples of them; None if asked to stop.

    Groups that are wholly beyond the staleness bound are dropped, with that reason, and others
    taken for them. A group of which only some tokens are beyond it stays, those tokens masked.

    Raises:
        TrainingError: there were not enough complete groups within `timeout_s`.
    """
    started = time.monotonic()
    leased: list[RolloutGroup] = []
    stale = 0
    while len(leased) < groups:
        more = _lease(store, groups - len(leased), step=step, timeout_s=timeout_s, stop=stop)
        if more is None:
            return None
        for group in more:
            if wholly_stale(group, version=version, max_staleness=max_staleness):
                reason = f"more than {max_staleness} versions old at version {version}"
                store.drop_group(group.id, reason, step=step)
                stale += 1
            else:
                leased.append(group)
    if stale:
        log.warning("step %d: dropped %d groups beyond the staleness bound", step, stale)
    wait_s = time.monotonic() - started
    samples, report = build_samples(leased, algorithm)
    fresh, staleness = mask_stale(samples, version=version, max_staleness=max_staleness)
    queue = _queue(store, leased)
    return Batch(tuple(g.id for g in leased), tuple(fresh), report, staleness, queue, stale, wait_s)


def _queue(store: Store, leased: list[RolloutGroup]) -> QueueReport:
    counts, now = store.group_counts(), time.time()
    ended = [max(e.ended_at or now for e in store.episodes(group_id=group.id)) for group in leased]
    return QueueReport(
        groups_complete=counts["complete"],
        groups_pending=counts["pending"],
        age_mean_s=now - sum(ended) / len(ended),
        age_max_s=now - min(ended),
        failed_episodes=len(store.episodes(split="train", status="failed")),
    )


def _lease(
    store: Store, count: int, *, step: int, timeout_s: float, stop: threading.Event
) -> list[RolloutGroup] | None:
    deadline = time.monotonic() + timeout_s
    holder = f"{socket.gethostname()}:{os.getpid()}"
    seen = None
    while not stop.is_set():
        cursor = store.cursor()
        counts = store.group_counts()
        if not any(counts.values()) and cursor != seen:  # an evaluation comes first, and is going on
            deadline = time.monotonic() + timeout_s
        seen = cursor
        if counts["complete"] >= count:  # a look takes no lock, a lease stops every writer
            groups = store.lease_groups(count, step=step, holder=holder, lease_s=_LEASE_S)
            if groups:
                return groups
        left = deadline - time.monotonic()
        if left <= 0:
            raise TrainingError(
                f"step {step} waited for {count} complete groups until its time ran out "
                f"(trainer.batch_timeout_s); the store has {counts}"
            )
        store.wait(cursor, min(_LOOK_S, left))
    return None
