"""Groups that play more episodes than they need, and how old the tokens of a group may be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store_support import complete_group, make_turn, open_episode, reward

from areal_agents.store import Conflict, Store


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


def statuses(store: Store) -> dict[str, str]:
    return {episode.id: episode.status for episode in store.episodes()}


def test_a_group_is_complete_with_as_many_episodes_as_its_size_and_aborts_the_others(store: Store) -> None:
    for name in "abcd":
        open_episode(store, name, surplus=2)
        store.add_turn(name, make_turn(f"{name}-t")).result()
    with pytest.raises(Conflict, match="4 live episodes already"):
        open_episode(store, "e")
    store.seal("a", "finished").result()  # its reward may still come
    store.seal("c", "finished", given=reward(1)).result()
    assert store.group_counts()["pending"] == 1
    store.seal("d", "truncated", truncated_reward=0.0).result()
    assert store.group_counts()["complete"] == 1
    assert statuses(store) == {"a": "aborted", "b": "aborted", "c": "finished", "d": "truncated"}
    assert store.episodes(status="aborted")[0].error == "its group was complete without it"
    assert [rollout.episode.id for rollout in store.load_groups(["t@0"])[0].rollouts] == ["c", "d"]
    with pytest.raises(Conflict, match="episode b is aborted"):
        store.seal("b", "finished", given=reward(1)).result()
    with pytest.raises(Conflict, match="accepts no rewards"):
        store.set_rewards("a", reward(1)).result()
    assert len(store.load_groups(["t@0"])[0].rollouts) == 2


def test_a_reward_from_outside_completes_a_group_too(store: Store) -> None:
    for name in "abc":
        open_episode(store, name, surplus=1)
    for name in "ab":
        store.seal(name, "finished").result()
    store.set_rewards("b", reward(0)).result()
    store.set_rewards("a", reward(1)).result()
    assert statuses(store) == {"a": "finished", "b": "finished", "c": "aborted"}


def test_every_episode_of_a_group_names_the_same_surplus_or_none(store: Store) -> None:
    open_episode(store, "a", surplus=1)
    open_episode(store, "b")
    with pytest.raises(Conflict, match="has surplus 1, got surplus 2"):
        open_episode(store, "c", surplus=2)
    open_episode(store, "c", index=2)
    (group,) = store.open_groups()
    assert (group.size, group.surplus, sorted(group.attempts)) == (2, 1, [0, 1, 2])


def test_a_group_has_a_lower_bound_of_the_versions_of_its_tokens(store: Store) -> None:
    def begins(name: str) -> int:
        complete_group(store, name, [1])
        return {group.id: group.version for group in store.waiting_groups()}[name]

    assert begins("before any version") == 0
    store.publish_version(4, step=0, path="x")
    assert begins("first of this life") == 4
    store.publish_version(5, step=1, path="x")
    assert begins("perhaps not swapped in yet") == 4
    ids = store.lease_group_ids(1, step=1)
    store.mark_trained(ids, step=1, version=5)
    assert begins("swapped in, for it was trained into") == 5
    assert [group.state for group in store.waiting_groups()] == ["complete"] * 3
    open_episode(store, "open", "pending@0")
    assert store.waiting_groups()[-1].state == "pending"


def test_after_a_resume_a_waiting_group_may_get_tokens_of_an_earlier_step(store: Store) -> None:
    for step in range(4):
        store.publish_version(step, step=step, path="nowhere")
    open_episode(store, "e", "t@0", 1)
    assert [group.version for group in store.waiting_groups()] == [2]  # version 3 may not be swapped in yet
    store.publish_version(4, step=1, path="nowhere")  # resumed
    store.publish_version(5, step=2, path="nowhere")
    open_episode(store, "f", "u@0", 1)
    assert [group.version for group in store.waiting_groups()] == [4, 4]
