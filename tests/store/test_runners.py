"""Groups of several rollout processes: they share one gate, and each group has one owner."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from store_support import complete_group, open_episode

from areal_agents.core.rollout import RUNNER, Task
from areal_agents.store import Admission, Conflict, NewGroup, Store


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


def begin(store: Store, name: str, runner: str = "a", at_most: int = 2, at_step: int | None = None) -> str:
    new = NewGroup(f"{name}@0", Task(name, {"question": 1}), 2, 0, runner, at_most, at_step)
    return store.begin_group(new).result().state


def test_the_gate_counts_groups_that_are_not_trained(store: Store) -> None:
    complete_group(store, "whole@0", [1, 0])
    complete_group(store, "held out@0", [1], split="eval")
    assert [begin(store, name) for name in "xyx"] == ["begun", "full", "begun"]
    store.publish_version(1, step=1, path="x")
    store.mark_trained(store.lease_group_ids(1, step=1), step=1, version=1)
    assert begin(store, "y") == "begun"
    store.drop_open_group("x@0", "no reason").result()
    assert [begin(store, "z", at_step=step) for step in (0, 2, 1)] == ["full", "full", "begun"]


def test_a_group_that_exists_is_taken_unless_the_same_request_is_repeated(store: Store) -> None:
    open_episode(store, "e", "alone@0")
    assert begin(store, "alone") == begin(store, "alone", runner="b") == "taken"
    new = NewGroup("x@0", Task("x", {}), 2, 1, "a", 9)
    first, again = store.begin_group(new).result(), store.begin_group(new).result()
    assert first == again == Admission("begun", 2)
    store.drop_open_group("x@0", "no reason").result()
    assert begin(store, "x") == "taken"
    assert store.groups_begun(0) == [(1, "alone@0"), (2, "x@0")] and store.groups_begun(2) == []


def test_two_processes_at_once_never_exceed_the_gate(url: str) -> None:
    results: Counter[str] = Counter()
    together = threading.Barrier(2)

    def ask(runner: str) -> None:
        with Store.open(url) as store:
            together.wait()
            for number in range(10):
                results[begin(store, f"t{number}", runner, at_most=7)] += 1

    with Store.open(url) as store:
        threads = [threading.Thread(target=ask, args=(runner,)) for runner in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results["begun"] == store.group_counts()["pending"] == 7
        assert [name for _, name in store.groups_begun(0)] == [f"t{number}@0" for number in range(7)]


def test_a_group_has_one_process_at_a_time(store: Store) -> None:
    begin(store, "x")
    open_episode(store, "of a", "x@0", metadata={RUNNER: "a"})
    for other in ({RUNNER: "b"}, {}):
        with pytest.raises(Conflict, match="played by a, and only that"):
            open_episode(store, "of another", "x@0", metadata=other)
    assert store.runners() == {"a"}
    claims = [store.claim_group("x@0", expected, "b").result() for expected in ("c", "a", "a", "b")]
    assert claims == [False, True, True, True]  # a repeated claim changes nothing
    assert not store.claim_group("x@0", "a", "c").result()
    with pytest.raises(Conflict, match="played by b, and only that"):
        open_episode(store, "late", "x@0", metadata={RUNNER: "a"})
    open_episode(store, "of b", "x@0", metadata={RUNNER: "b"})
    assert [(group.runner, group.seq) for group in store.open_groups()] == [("b", 1)]
    assert [group.runner for group in store.untrained_groups()] == ["b"]
    assert store.claim_group("x@0", "b", None).result()  # a run with a single process
    store.drop_open_group("x@0", "no reason").result()
    assert not store.claim_group("x@0", None, "c").result()


def test_a_group_without_episodes_is_not_abandoned(store: Store) -> None:
    begin(store, "x")
    assert store.abandoned_groups() == []


def test_the_id_of_an_episode_is_used_only_once(store: Store) -> None:
    open_episode(store, "mine", None, is_named=True)
    store.seal("mine", "aborted").result()
    with pytest.raises(Conflict, match="there is an episode mine already"):
        open_episode(store, "mine", None, is_named=True)
