"""Batches are filled with groups that can be trained on; other groups are dropped with a reason."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from store_queries import in_flight_episodes
from stored_support import (
    break_reward,
    drop_reasons,
    empty_group,
    execute,
    put_group,
    shorten_logprobs,
)

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import TrainingError
from areal_agents.store import Store
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.leasing import Batch, next_batch

DPO = AlgorithmConfig.model_validate({"preset": "dpo"})
REFILL = AlgorithmConfig(refill_equal_groups=True)


def take(
    store: Store,
    algorithm: AlgorithmConfig | None = None,
    *,
    groups: int = 2,
    version: int = 0,
    max_staleness: int = 4,
    budget: int = 64,
    stop: threading.Event | None = None,
    **options: Any,
) -> Batch | None:
    return next_batch(
        store,
        algorithm or AlgorithmConfig(),
        groups=groups,
        step=1,
        version=version,
        max_staleness=max_staleness,
        limits=SampleLimits(budget, 96),
        timeout_s=options.get("timeout_s", 0.2),
        stop=stop or threading.Event(),
        ahead=options.get("ahead", 0),
    )


def test_a_batch_is_taken_only_while_enough_further_groups_are_complete(store: Store) -> None:
    for name in "abcd":
        put_group(store, name, [0, 1])
    with pytest.raises(TrainingError, match="did not get 6 complete groups within the time limit"):
        take(store, ahead=4)
    for name in "ef":
        put_group(store, name, [0, 1])
    batch = take(store, ahead=4)
    assert batch is not None and batch.group_ids == ("a", "b")


def test_equal_groups_are_replaced_and_counted(store: Store) -> None:
    for name, scores in (("a", [1, 1]), ("b", [0, 1]), ("c", [0, 0]), ("d", [1, 1]), ("e", [1, 0])):
        put_group(store, name, scores)
    in_flight = in_flight_episodes(store)
    batch = take(store, REFILL)
    assert batch is not None and batch.group_ids == ("b", "e")
    assert batch.equal_groups == 3 and batch.bad_groups == {}
    assert {sample.group_id for sample in batch.samples} == {"b", "e"}
    assert drop_reasons(store) == dict.fromkeys("acd", "all its episodes have the same score")
    assert in_flight_episodes(store) == in_flight - 6  # the gate no longer counts them
    assert store.group_counts()["leased"] == 2


def test_without_refill_equal_groups_stay_in_the_batch_untrained(store: Store) -> None:
    for name, scores in (("a", [1, 1]), ("b", [0, 1])):
        put_group(store, name, scores)
    batch = take(store)
    assert batch is not None and batch.group_ids == ("a", "b") and batch.equal_groups == 0
    assert {sample.group_id for sample in batch.samples} == {"b"}


def test_refilling_is_limited_so_that_a_solved_data_set_does_not_stop_training(store: Store) -> None:
    for index in range(12):
        put_group(store, f"g{index:02}", [1, 1])
    batch = take(store, REFILL, groups=1)
    assert batch is not None and batch.equal_groups == 8 and batch.group_ids == ("g08",)
    assert batch.samples == () and store.group_counts()["complete"] == 3


def test_a_refill_can_be_stopped(store: Store) -> None:
    put_group(store, "a", [1, 1])
    stop = threading.Event()

    def stop_once_it_waits_for_another() -> None:
        cursor = store.cursor()
        while not store.group_counts()["dropped"]:
            cursor = store.wait(cursor, 10)
        stop.set()

    watching = threading.Thread(target=stop_once_it_waits_for_another)
    watching.start()
    assert take(store, REFILL, groups=1, stop=stop, timeout_s=60) is None
    watching.join()


def _long(store: Store) -> None:
    put_group(store, "bad", [0, 1], prompt=80)


def _foreign_token(store: Store) -> None:
    put_group(store, "bad", [0, 1], token=96)


def _future(store: Store) -> None:
    put_group(store, "bad", [0, 1], version=5)


def _broken(change: Callable[[Store], None]) -> Callable[[Store], None]:
    def put(store: Store) -> None:
        put_group(store, "bad", [0, 1])
        change(store)

    return put


BAD = {
    "reward": (_broken(lambda s: break_reward(s, "bad-1")), "a reward must be a finite number, got inf"),
    "logprobs": (_broken(lambda s: shorten_logprobs(s, "bad-0")), "it cannot be read"),
    "empty": (
        _broken(lambda s: empty_group(s, "bad")),
        "it cannot be read: group bad must have at least one rollout",
    ),
    "record": (
        _broken(lambda s: execute(s, "update turns set record = x'7b' where episode_id = 'bad-0'")),
        "it cannot be read",
    ),
    "long": (_long, "a sample of 84 tokens does not fit a micro-batch of 64"),
    "token": (_foreign_token, "token 96 is not in the model's vocabulary of 96"),
    "future": (_future, "a token has version 5, but the trainer is at version 0"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_group_is_dropped_named_and_replaced(
    store: Store, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    put, reason = BAD[kind]
    put(store)
    put_group(store, "good", [0, 1])
    put_group(store, "other", [1, 0])
    batch = take(store)
    assert batch is not None and batch.group_ids == ("good", "other")
    assert {sample.group_id for sample in batch.samples} == {"good", "other"}
    assert list(batch.bad_groups) == ["bad"] and reason in batch.bad_groups["bad"]
    assert drop_reasons(store) == dict(batch.bad_groups)
    assert "group bad is dropped" in caplog.text
    assert all(math.isfinite(reward) for reward in batch.report.rewards)


def test_too_many_bad_groups_end_the_run_with_the_reason(store: Store) -> None:
    for index in range(9):
        put_group(store, f"g{index}", [0, 1], prompt=80)
    with pytest.raises(TrainingError, match=r"5 groups cannot be trained on.*trainer\.microbatch_tokens"):
        take(store)
    assert store.return_leases(0) == 6  # a resumed run gets all of them back
    batch = take(store, budget=128)
    assert batch is not None and len(batch.group_ids) == 2


def test_a_pair_with_a_stale_episode_is_left_out(store: Store) -> None:
    put_group(store, "a", [0, 1], version=(0, 3))
    put_group(store, "b", [0, 1], version=(3, 3))
    batch = take(store, DPO, version=3, max_staleness=1)
    assert batch is not None and batch.group_ids == ("a", "b")
    assert batch.data.pairs == (("b-1", "b-0"),)
    assert [sample.episode_id for sample in batch.samples] == ["b-0", "b-1"]
    assert batch.staleness.masked_tokens == 5
