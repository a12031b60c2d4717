"""Staleness after a resume is counted in batches, not in version numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored_support import put_group

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.core.rollout import OnStale
from areal_agents.store import Store
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.leasing import Batch, next_batch
from areal_agents.training.batches.staleness import Lineage


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


def take(store: Store, *, step: int, version: int, on_stale: OnStale = "drop") -> Batch:
    batch = next_batch(
        store, AlgorithmConfig(drop_equal_groups=False), groups=1, step=step, version=version,
        max_staleness=1, on_stale=on_stale, limits=SampleLimits(64, 96), timeout_s=5, stop=threading.Event(),
    )  # fmt: skip
    assert batch is not None
    return batch


def test_versions_of_lost_and_earlier_steps_are_counted_by_their_steps(store: Store) -> None:
    for version, step in ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 2), (6, 3), (7, 3), (8, 4)):
        store.publish_version(
            version, step=step, path="nowhere"
        )  # resumed before version 5 and before version 7
    lineage = Lineage.of(store, 8)
    #                                       0  1  2  3  4 | 5  6 | 7  8   and one that was never published
    assert [lineage.counted(v) for v in range(10)] == [4, 5, 6, 7, 8, 6, 7, 7, 8, 9]
    # At step 2, the lost versions of steps 3 and 4 are 1 and 2 steps ahead, which counts as 1 and 2 behind.
    assert [Lineage.of(store, 5).counted(v) for v in range(6)] == [3, 4, 5, 4, 3, 5]
    assert Lineage.of(store, 4).moved == {} and Lineage.of(store, 99).moved == {}


@pytest.mark.parametrize("on_stale", ["mask", "drop", "wait"])
def test_groups_of_lost_steps_are_trained_again_with_the_same_staleness(
    store: Store, on_stale: OnStale
) -> None:
    """Four steps have tokens at the bound, and no checkpoint. A resumed run trains each of them again on the
    same group, whose tokens are as old as the first time."""
    store.publish_version(0, step=0, path="nowhere")
    ages = []
    for step in range(1, 5):
        put_group(store, f"g{step}", [0, 1], version=[step - 1, max(0, step - 2)])
        batch = take(store, step=step, version=step - 1, on_stale=on_stale)
        ages.append(sorted(batch.staleness.staleness.tolist()))
        store.publish_version(step, step=step, path="nowhere")
        store.mark_trained(batch.group_ids, step=step, version=step)
    assert ages[-1] == [0] * 5 + [1] * 5

    assert store.return_leases(0) == 4
    store.publish_version(5, step=0, path="nowhere")  # the initial weights again
    for step in range(1, 5):
        version = 4 + step
        batch = take(store, step=step, version=version, on_stale=on_stale)
        assert (batch.group_ids, batch.stale_groups) == ((f"g{step}",), 0)
        assert sorted(batch.staleness.staleness.tolist()) == ages[step - 1]
        assert batch.staleness.masked_tokens == 0
        store.publish_version(version + 1, step=step, path="nowhere")
        store.mark_trained(batch.group_ids, step=step, version=version + 1)
