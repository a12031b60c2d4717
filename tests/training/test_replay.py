"""Groups that are trained on again: which ones, how often, and how they are reported."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from stored_support import drop_reasons, put_group

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.config import validate_config
from areal_agents.errors import ConfigError
from areal_agents.store import Store
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.leasing import Batch, next_batch

REPLAY = AlgorithmConfig.model_validate({"replay": "recent", "replay_groups": 2, "replay_uses": 3})


def take(store: Store, step: int, *, algorithm: AlgorithmConfig = REPLAY, max_staleness: int = 4) -> Batch:
    batch = next_batch(
        store,
        algorithm,
        groups=2,
        step=step,
        version=step - 1,
        max_staleness=max_staleness,
        limits=SampleLimits(64, 96),
        timeout_s=0.2,
        stop=threading.Event(),
    )
    assert batch is not None
    return batch


def train(store: Store, step: int, **options: Any) -> Batch:
    batch = take(store, step, **options)
    store.publish_version(step, step=step, path="")
    store.mark_trained([*batch.group_ids, *batch.replayed], step=step, version=step)
    return batch


def test_the_newest_trained_groups_are_trained_on_again_as_often_as_configured(store: Store) -> None:
    for name in "abcdefgh":
        put_group(store, name, [0, 1])
    store.publish_version(0, step=0, path="")
    first = train(store, 1)
    assert first.group_ids == ("a", "b") and first.replayed == ()
    second = train(store, 2)
    assert second.group_ids == ("c", "d") and second.replayed == (("b", 1), ("a", 1))
    assert {sample.group_id for sample in second.samples} == set("abcd")
    assert len(second.report.rewards) == 4  # the report covers the new groups alone
    third = train(store, 3)
    assert third.group_ids == ("e", "f") and third.replayed == (("d", 1), ("c", 1))
    counts = store.group_counts()
    assert counts["trained"] == 6 and counts["complete"] == 2 and counts["leased"] == 0
    fourth = train(store, 4)
    assert fourth.replayed == (("f", 1), ("e", 1))


def test_groups_beyond_the_staleness_bound_are_not_trained_on_again(store: Store) -> None:
    for name in "abcdef":
        put_group(store, name, [0, 1])
    store.publish_version(0, step=0, path="")
    train(store, 1, max_staleness=1)
    second = train(store, 2, max_staleness=1)  # at version 1: tokens of version 0 are one version old
    assert [name for name, _ in second.replayed] == ["b", "a"]
    third = take(store, 3, max_staleness=2)
    assert third.replayed == (("d", 1), ("c", 1))
    assert third.staleness.staleness.max() <= 2 and third.staleness.masked_tokens == 0


def test_a_group_with_nothing_to_train_on_is_not_taken_again(store: Store) -> None:
    for name, scores in (("a", [1, 1]), ("b", [0, 1]), ("c", [0, 1]), ("d", [0, 1])):
        put_group(store, name, scores)
    store.publish_version(0, step=0, path="")
    train(store, 1)
    second = train(store, 2)
    assert second.replayed == (("b", 1),)
    assert drop_reasons(store) == {"a": "it has nothing to train on"}
    assert store.group_counts()["trained"] == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout": {"max_staleness": 0}}, "which rollout.max_staleness: 0 does not"),
        ({"data": {"episodes": "EXISTS"}, "agent": ""}, "algorithm.replay: training on data.episodes"),
    ],
)
def test_replay_is_refused_where_it_would_have_no_effect(
    changes: dict[str, Any], reason: str, model_folder: Any, store: Store
) -> None:
    tree: dict[str, Any] = {
        "model": str(model_folder),
        "agent": "a:b",
        "data": {"path": "x.jsonl"},
        "algorithm": {"replay": "recent"},
        **changes,
    }
    if "episodes" in tree["data"]:
        tree["data"] = {"episodes": store.url.removeprefix("sqlite:///")}
    with pytest.raises(ConfigError, match=reason):
        validate_config(tree, source="test")
