"""Deleted episodes leave nothing in the files of the store, and the trainer does not miss them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_agents.store import Conflict, NotFound, Store
from tests.store.store_support import complete_group, make_turn, open_episode, reward


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as store:
        yield store


def files_with(store: Store, text: str) -> list[str]:
    return [path.name for path in store.path.parent.iterdir() if text.encode() in path.read_bytes()]


def converse(store: Store, name: str) -> None:
    open_episode(store, name, name, 1, implicit_key=f"project/{name}", metadata={"user": f"user of {name}"})
    store.add_turn(name, make_turn(f"{name}/a")).result()
    store.set_rewards(name, reward(1.0)).result()
    store.seal(name, "finished").result()


def test_nothing_of_it_is_left_in_any_file(store: Store) -> None:
    for name in ("kept", "gone"):
        converse(store, name)
    assert files_with(store, "question of gone/a") and files_with(store, "user of gone")
    with Store.open(store.path) as other:  # another process that has the store open
        assert other.load_episode("gone").turns
        assert store.delete_episodes(["gone", "unknown"]).result() == ["gone"]
        store.clear_log()
    for text in ("question of gone/a", "answer of gone/a", "user of gone", "gone"):
        assert not files_with(store, text), text
    with pytest.raises(NotFound):
        store.load_episode("gone")
    assert [turn.reply.content for turn in store.load_episode("kept").turns] == ["answer of kept/a"]
    assert store.group_counts()["complete"] == 1


def test_an_open_episode_is_ended_first(store: Store) -> None:
    open_episode(store, "open", "open", 1)
    with pytest.raises(Conflict, match="open"):
        store.delete_episodes(["open"]).result()
    store.seal("open", "aborted").result()
    assert store.delete_episodes(["open"]).result() == ["open"]
    assert not any(store.group_counts().values())


def test_the_trainer_ends_the_step_of_a_deleted_conversation_and_never_takes_it_again(store: Store) -> None:
    for name in ("first", "second"):
        converse(store, name)
    store.become_trainer()
    assert store.lease_group_ids(2, step=1) == ["first", "second"]
    store.delete_episodes(["first"]).result()
    store.clear_log()
    assert not files_with(store, "question of first/a") and not files_with(store, "user of first")
    store.mark_trained(["first", "second"], step=1, version=1)
    assert store.group_counts()["trained"] == 2
    assert store.return_leases(0) == 1, "a resume from before the step trains the other one again"
    assert store.lease_group_ids(1, step=1) == ["second"]
    assert store.group_counts() == {"pending": 0, "complete": 0, "leased": 1, "trained": 0, "dropped": 1}


def test_a_group_without_one_of_its_episodes_is_not_trained_on(store: Store) -> None:
    complete_group(store, "t@0", [0.0, 1.0])
    store.delete_episodes(["t@0/1"]).result()
    assert store.group_counts()["dropped"] == 1
    assert store.load_episode("t@0/0").turns
