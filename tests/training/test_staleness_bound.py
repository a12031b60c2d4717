"""The staleness rules for a batch: which groups are waited for, dropped, masked or downweighted."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_support import put_group
from training_support import random_group, training_data

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.core.rollout import OnStale, Reward, Task
from areal_agents.errors import TrainingError
from areal_agents.store import NewEpisode, Store
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.leasing import Batch, next_batch
from areal_agents.training.batches.source import wait_until_whole
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import load_policy
from areal_agents.training.step.plan import lay_out


class Waking(Store):
    """A store that calls `act` when the trainer waits for the first time."""

    def wait(self, cursor: int, timeout_s: float) -> int:
        act, self.act = self.act, lambda: None
        act()
        return super().wait(cursor, 0.01)

    act: Callable[[], object] = staticmethod(lambda: None)


@pytest.fixture
def waking(tmp_path: Path) -> Any:
    with Waking.open(tmp_path / "waking.db") as opened:
        yield opened


def take(store: Store, on_stale: OnStale, *, version: int, groups: int = 1, **options: Any) -> Batch:
    batch = next_batch(
        store,
        AlgorithmConfig(drop_equal_groups=False),
        groups=groups,
        step=1,
        version=version,
        max_staleness=options.pop("max_staleness", 1),
        on_stale=on_stale,
        limits=SampleLimits(64, 96),
        timeout_s=options.pop("timeout_s", 10),
        stop=threading.Event(),
    )
    assert batch is not None
    return batch


def begin(store: Store, name: str) -> Callable[[], object]:
    """Open the only episode of a group; return a function that ends it."""
    key_hash = hashlib.sha256(name.encode()).hexdigest()
    new = NewEpisode(id=name, key_hash=key_hash, task=Task(name, {}), group_id=name, group_size=1)
    store.open_episode(new).result()
    return lambda: store.seal(name, "finished", given=[Reward("episode", "", "return", 1.0)]).result()


def publish(store: Store, *versions: int) -> None:
    for version in versions:
        store.publish_version(version, step=version, path="nowhere")


def test_the_trainer_waits_for_a_group_that_is_due(waking: Waking) -> None:
    publish(waking, 0)
    waking.act = begin(waking, "old")  # its version is 0, so it must be trained at version 1
    publish(waking, 1, 2)
    put_group(waking, "young", [0, 1], version=1)
    assert take(waking, "wait", version=1).group_ids == ("old",)


@pytest.mark.parametrize(("on_stale", "max_staleness"), [("mask", 1), ("wait", 2), ("wait", None)])
def test_the_trainer_does_not_wait_for_a_group_that_is_not_due(
    waking: Waking, on_stale: OnStale, max_staleness: int | None
) -> None:
    publish(waking, 0)
    waking.act = begin(waking, "old")
    publish(waking, 1, 2)
    put_group(waking, "young", [0, 1], version=1)
    batch = take(waking, on_stale, version=1, max_staleness=max_staleness)
    assert batch.group_ids == ("young",)
    assert waking.group_counts()["pending"] == 1


def test_a_group_that_waiting_cannot_save_is_taken_once_it_is_the_oldest(waking: Waking) -> None:
    publish(waking, 0)
    put_group(waking, "late", [0, 1], version=(0, 7))
    begin(waking, "also late")
    batch = take(waking, "wait", version=7)
    assert batch.group_ids == ("late",) and batch.staleness.masked_tokens == 5


def test_the_wait_for_a_group_that_never_completes_ends_with_the_reason(waking: Waking) -> None:
    publish(waking, 0)
    begin(waking, "old")
    put_group(waking, "young", [0, 1])
    message = r"did not get the older groups that rollout.on_stale: wait waits for"
    with pytest.raises(TrainingError, match=message):
        take(waking, "wait", version=1, timeout_s=0.05)


def test_a_group_with_any_stale_token_is_dropped_and_another_taken(store: Store) -> None:
    put_group(store, "mixed", [0, 1], version=(0, 3))
    put_group(store, "fresh", [0, 1], version=(2, 3))
    batch = take(store, "drop", version=3)
    assert batch.group_ids == ("fresh",) and batch.stale_groups == 1
    assert batch.staleness.masked_tokens == 0 and store.group_counts()["dropped"] == 1
    assert batch.staleness.share_by_length == {"1": 1.0, "3": 1.0, "6": 0.0, "8": 0.0}


def test_masking_keeps_the_other_tokens_of_a_group(store: Store) -> None:
    put_group(store, "mixed", [0, 1], version=(0, 3))
    batch = take(store, "mask", version=3)
    assert batch.group_ids == ("mixed",) and batch.staleness.masked_tokens == 5
    assert {sample.episode_id for sample in batch.samples} == {"mixed-1"}
    assert batch.staleness.share_by_length == {"1": 1.0, "6": 0.0}


def test_older_tokens_count_less_and_the_denominator_is_unchanged(group: Ranks, model_folder: Path) -> None:
    samples = random_group(np.random.default_rng(0), group_id="g")
    ages = {"g-0": 0, "g-1": 1, "g-2": 3, "g-3": 0}
    aged = [replace(s, versions=np.where(s.loss_mask, 5 - ages[s.episode_id], -1)) for s in samples]
    shape = load_policy(model_folder, group).shape

    def weights(downweight_at: int | None) -> dict[int, set[float]]:
        plan = lay_out(
            training_data(aged), AlgorithmConfig(), ranks=group, shape=shape, token_budget=4096,
            share_prefixes=True, seed=0, downweight_at=downweight_at,
        )  # fmt: skip
        found: dict[int, set[float]] = {}
        for work in plan.work:
            pairs = zip(work.batch.versions.tolist(), work.batch.loss_weights.tolist(), strict=True)
            for version, weight in pairs:
                found.setdefault(5 - version, set()).add(round(weight, 9))
        return found

    (plain,) = weights(None)[0]
    assert weights(None) == {0: {plain}, 1: {plain}, 3: {plain}}
    assert weights(5) == {0: {plain}, 1: {round(plain / 2, 9)}, 3: {round(plain / 4, 9)}}
    tokens = sum(int(sample.loss_mask.sum()) for sample in aged)
    assert plain == pytest.approx(1 / tokens)


def wait_beside(
    store: Store,
    *,
    groups: int = 2,
    timeout_s: float = 10,
    stopped: bool = False,
    data_ended: Callable[[], bool] = lambda: False,
) -> None:
    stop = threading.Event()
    if stopped:
        stop.set()
    wait_until_whole(store, groups=groups, data_ended=data_ended, timeout_s=timeout_s, stop=stop)


def test_a_swap_waits_until_the_next_batch_is_complete(waking: Waking) -> None:
    put_group(waking, "a", [0, 1])
    waking.act = begin(waking, "b")
    wait_beside(waking)
    assert waking.group_counts()["complete"] == 2
    begin(waking, "c")
    with pytest.raises(TrainingError, match="one_step_off swaps weights between batches only"):
        wait_beside(waking, timeout_s=0.05)
    wait_beside(waking, timeout_s=0.05, stopped=True)  # a stop comes first


def test_a_swap_does_not_wait_for_groups_that_the_data_does_not_have(waking: Waking) -> None:
    put_group(waking, "a", [0, 1])
    waking.act = begin(waking, "b")
    wait_beside(waking, groups=3, data_ended=lambda: True)
    assert waking.group_counts()["complete"] == 2  # the group that has begun is waited for


def test_a_swap_waits_for_a_last_group_that_begins_while_the_data_ends(waking: Waking) -> None:
    def begins_it() -> bool:
        waking.act = begin(waking, "last")
        return True

    put_group(waking, "a", [0, 1])
    wait_beside(waking, groups=3, data_ended=begins_it)
    assert (waking.group_counts()["pending"], waking.group_counts()["complete"]) == (0, 2)
