"""Data is read as it was written, and states change only as they may."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy
from postgres_server import PostgresServer
from store_queries import in_flight_episodes, latest_checkpoint, lease_groups
from store_support import complete_group, make_turn, open_episode, reward

from areal_agents.core.rollout import Reward, Task
from areal_agents.core.trajectory import Turn
from areal_agents.errors import StoreError
from areal_agents.store import Conflict, NewEpisode, NotFound, Store, chunks, schema


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


def assert_same_turn(left: Turn, right: Turn) -> None:
    """Compare turns by field, because they contain arrays."""
    for field in dataclasses.fields(Turn):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if field.name == "completion":
            assert a.finish_reason == b.finish_reason
            for name in ("token_ids", "logprobs", "versions"):
                x, y = getattr(a, name), getattr(b, name)
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)
        elif field.name == "new_prompt_ids":
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b, field.name


def test_an_episode_is_read_as_it_was_written(store: Store) -> None:
    open_episode(
        store, "e", metadata={"eval": "before"}, limits={"max_turns": 3}, sampling={"temperature": 0}
    )
    turns = [make_turn("a"), make_turn("b", parent="a", version=4), make_turn("c")]
    turns.append(dataclasses.replace(make_turn("d", parent="c"), recorded_before=None))
    for turn in turns:
        store.add_turn("e", turn).result()
    store.set_rewards(
        "e", [Reward("turn", "b", "style", 0.25), Reward("episode", "", "return", 1.0)]
    ).result()
    episode = store.load_episode("e")
    for written, read in zip(turns, episode.turns, strict=True):
        assert_same_turn(written, read)
    assert episode.task == Task("t", {"question": 1}) and episode.score == 1.25
    assert [trajectory.token_ids.tolist() for trajectory in episode.forest.trajectories()] == [
        [5, 6, 7, 8, 9, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9],
    ]  # fmt: skip
    row = store.episode_row("e")
    assert (row.limits, row.sampling, row.metadata) == (
        {"max_turns": 3},
        {"temperature": 0},
        {"eval": "before"},
    )
    (summary,) = store.episodes(metadata={"eval": "before"})
    assert (summary.turns, summary.sampled_tokens, summary.score) == (4, 8, 1.25)
    assert (summary.version_min, summary.version_max) == (0, 5)
    by_key, by_key_turns = store.episode_by_key("hash of e")
    assert by_key == row and [turn.id for turn in by_key_turns] == ["a", "b", "c", "d"]
    assert store.episode_of_turn("b") == row


def test_summaries_are_filtered(store: Store) -> None:
    open_episode(store, "e1", metadata={"eval": "before", "n": 1, "x": 0.5, "flag": True})
    open_episode(store, "e2", group=None, split="eval", metadata={"eval": "after"})
    store.seal("e2", "failed", error="crash").result()

    def ids(**conditions: object) -> list[str]:
        return [summary.id for summary in store.episodes(**conditions)]  # type: ignore[arg-type]

    assert ids() == ["e1", "e2"]
    assert ids(split="eval") == ids(status="failed") == ids(metadata={"eval": "after"}) == ["e2"]
    assert ids(group_id="t@0") == ids(metadata={"n": 1, "x": 0.5, "flag": True}) == ["e1"]
    assert ids(metadata={"n": 2}) == ids(metadata={"none": "x"}) == []
    with pytest.raises(ValueError, match="metadata"):
        ids(metadata={"n": None})


def test_two_data_sets_may_share_task_ids(store: Store) -> None:
    for episode_id, question in (("e1", "train"), ("e2", "held out")):
        new = NewEpisode(episode_id, episode_id, Task("0", {"q": question}), split="eval")
        store.open_episode(new).result()
    assert [store.load_episode(id).task.input["q"] for id in ("e1", "e2")] == ["train", "held out"]


def test_unknown_ids_are_not_found(store: Store) -> None:
    for read in (
        store.load_episode,
        lambda group_id: store.load_groups([group_id]),
        store.episode_row,
        store.episode_by_key,
        store.episode_of_turn,
    ):
        with pytest.raises(NotFound):
            read("none")
    for write in (
        store.add_turn("none", make_turn("a")),
        store.seal("none", "finished"),
        store.set_rewards("none", reward(1)),
        store.drop_open_group("none", "x"),
    ):
        with pytest.raises(NotFound):
            write.result()


def test_a_sealed_episode_takes_no_turn(store: Store) -> None:
    open_episode(store, "e")
    assert store.seal("e", "finished").result().status == "finished"
    with pytest.raises(Conflict, match="finished"):
        store.add_turn("e", make_turn("a")).result()
    with pytest.raises(Conflict, match="cannot become failed"):
        store.seal("e", "failed").result()
    assert store.seal("e", "finished").result().status == "finished"


def test_an_episode_that_reached_a_limit_finishes_as_truncated(store: Store) -> None:
    open_episode(store, "e")
    store.mark_limit("e", "max_turns").result()
    store.mark_limit("e", "max_tokens").result()
    assert store.episode_row("e").limit_reached == "max_turns"  # the first limit is kept
    assert store.seal("e", "finished", truncated_reward=-1).result().status == "truncated"
    assert store.seal("e", "finished").result().status == "truncated"
    assert store.load_episode("e").score == -1
    store.set_rewards("e", reward(0.5)).result()
    assert store.load_episode("e").score == 0.5


def test_the_last_write_of_a_reward_wins_and_rewards_of_all_names_are_summed(store: Store) -> None:
    open_episode(store, "e")
    for value in (1.0, 0.25):
        store.set_rewards("e", reward(value)).result()
    store.set_rewards("e", reward(2.0, name="style")).result()
    assert store.load_episode("e").score == 2.25
    with pytest.raises(NotFound, match="no completion"):
        store.set_rewards("e", [*reward(9), Reward("turn", "none", "x", 1)]).result()
    assert store.load_episode("e").score == 2.25  # a write is applied completely or not at all


def test_a_group_goes_from_pending_to_trained(store: Store) -> None:
    open_episode(store, "e0")
    open_episode(store, "e1")
    store.set_rewards("e0", reward(1)).result()
    store.seal("e0", "finished").result()
    store.seal("e1", "finished").result()
    assert store.group_counts() == {"pending": 1, "complete": 0, "leased": 0, "trained": 0, "dropped": 0}
    store.set_rewards("e1", reward(0)).result()
    assert store.group_counts()["complete"] == 1 and in_flight_episodes(store) == 2

    (group,) = lease_groups(store, 1, step=4)
    assert group.id == "t@0" and [rollout.index for rollout in group.rollouts] == [0, 1]
    assert store.group_counts()["leased"] == 1 and in_flight_episodes(store) == 2
    with pytest.raises(Conflict, match="leased"):
        store.set_rewards("e1", reward(1)).result()
    with pytest.raises(Conflict):
        store.mark_trained(["t@0"], step=5, version=1)
    store.mark_trained(["t@0"], step=4, version=1)
    assert store.group_counts()["trained"] == 1 and in_flight_episodes(store) == 0
    with pytest.raises(Conflict, match="trained"):
        store.drop_group("t@0", "x", step=4)
    with pytest.raises(Conflict, match="trained"):
        store.set_rewards("e1", reward(1)).result()


def test_failed_attempts_free_their_place(store: Store) -> None:
    open_episode(store, "e0", index=1)
    store.seal("e0", "failed", error="crash").result()
    open_episode(store, "e1", index=1)
    with pytest.raises(Conflict, match="index 1"):
        open_episode(store, "e2", index=1)
    open_episode(store, "e2")
    with pytest.raises(Conflict, match="2 live"):
        open_episode(store, "e3")
    assert in_flight_episodes(store) == 2
    (group,) = store.open_groups()
    assert (group.id, group.size, group.task.id) == ("t@0", 2, "t")
    assert {index: [s.id for s in tried] for index, tried in group.attempts.items()} == {
        0: ["e2"],
        1: ["e0", "e1"],
    }
    for episode_id in ("e1", "e2"):
        store.set_rewards(episode_id, reward(1)).result()
        store.seal(episode_id, "finished").result()
    assert [r.episode.id for r in store.load_groups(["t@0"])[0].rollouts] == ["e2", "e1"]
    assert store.open_groups() == []


def test_groups_are_leased_oldest_first_all_or_none(store: Store) -> None:
    for name in ("a@0", "b@0", "c@0"):
        complete_group(store, name, [0, 1])
    complete_group(store, "held@0", [1], split="eval")
    assert lease_groups(store, 4, step=0) == []
    assert store.group_counts()["complete"] == 3
    assert [group.id for group in lease_groups(store, 2, step=0)] == ["a@0", "b@0"]
    assert [group.id for group in lease_groups(store, 1, step=1)] == ["c@0"]
    assert store.group_counts("eval")["complete"] == 1
    assert store.task_ids_started() == [("a", 0), ("b", 0), ("c", 0)]
    with pytest.raises(ValueError, match="count"):
        lease_groups(store, 0, step=1)


def test_groups_in_any_state_before_training_can_be_dropped(store: Store) -> None:
    complete_group(store, "a@0", [0, 0])
    complete_group(store, "b@0", [0, 0])
    open_episode(store, "e", "c@0")
    lease_groups(store, 1, step=0)
    store.drop_group("a@0", "no variance", step=0)
    store.drop_group("b@0", "stale", step=0)
    with pytest.raises(Conflict, match="pending"):
        store.drop_group("c@0", "x", step=0)
    store.drop_open_group("c@0", "run is over").result()
    assert store.group_counts() == {"pending": 0, "complete": 0, "leased": 0, "trained": 0, "dropped": 3}
    assert in_flight_episodes(store) == 0
    with pytest.raises(Conflict, match="dropped"):
        store.drop_open_group("a@0", "x").result()


def test_a_resume_returns_the_leases_after_the_checkpoint(store: Store) -> None:
    for name in ("a@0", "b@0", "c@0", "d@0"):
        complete_group(store, name, [0, 1])
    assert latest_checkpoint(store) is None
    for step in range(2):
        (group,) = lease_groups(store, 1, step=step)
        store.mark_trained([group.id], step=step, version=step + 1)
        store.commit_checkpoint(step)
    lease_groups(store, 1, step=2)
    store.drop_group("d@0", "no variance", step=2)
    assert latest_checkpoint(store) == 1
    assert store.return_leases(after_step=0) == 3
    assert latest_checkpoint(store) == 0
    assert store.group_counts() == {"pending": 0, "complete": 3, "leased": 0, "trained": 1, "dropped": 0}
    store.set_rewards("b@0/0", reward(5)).result()  # the group is no longer leased
    assert [group.id for group in lease_groups(store, 3, step=1)] == ["b@0", "c@0", "d@0"]


def test_versions_only_grow(store: Store) -> None:
    assert store.latest_version() is None and store.max_version() == -1
    store.publish_version(0, step=0, path="weights/v0")
    store.publish_version(5, step=1, path=Path("weights/v5"), checksum="abc")
    latest = store.latest_version()
    assert latest is not None and (latest.version, latest.step, latest.path) == (5, 1, "weights/v5")
    for version in (5, 3):
        with pytest.raises(Conflict, match="never reused"):
            store.publish_version(version, step=2, path="x")
    assert store.max_version() == 5


def test_a_finished_episode_without_a_reward_can_be_failed(store: Store) -> None:
    open_episode(store, "e0")
    open_episode(store, "e1", group=None)  # outside a group, no reward is required
    store.seal("e0", "finished").result()
    store.seal("e1", "finished").result()
    open_episode(store, "e3", index=1)
    assert store.unrewarded_episodes() == ["e0"]
    assert store.fail_unrewarded(["e1", "e3"]).result() == []  # e1 requires no reward, and e3 is open
    assert store.fail_unrewarded(["e0", "e1"]).result() == ["e0"]
    assert store.unrewarded_episodes() == []
    assert (store.episode_row("e0").status, store.episode_row("e0").error) == ("failed", "no_reward")
    open_episode(store, "e2", index=0)


def test_a_failed_write_does_not_fail_others(store: Store) -> None:
    """Writes are committed together, but fail separately."""
    open_episode(store, "e")
    futures = [store.add_turn("e", make_turn(f"t{index % 9}")) for index in range(18)]
    failures = [future.exception() for future in futures]
    assert [failure is None for failure in failures] == [True] * 9 + [False] * 9
    assert all(isinstance(failure, StoreError) for failure in failures[9:])
    assert [turn.id for turn in store.load_episode("e").turns] == [f"t{index}" for index in range(9)]


def test_a_store_that_is_locked_for_too_long_says_so_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_agents.store.sqlite._BUSY_TIMEOUT_S", 0.1)
    with Store.open(tmp_path / "s.db") as store:
        open_episode(store, "e")
        other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        futures = [store.add_turn("e", make_turn(f"t{index}")) for index in range(3)]
        for future in futures:
            with pytest.raises(StoreError, match="locked"):
                future.result()
        other.execute("ROLLBACK")
        other.close()
        store.add_turn("e", make_turn("later")).result()
        assert [turn.id for turn in store.load_episode("e").turns] == ["later"]


def test_closing_commits_what_is_queued(url: str) -> None:
    store = Store.open(url)
    open_episode(store, "e")
    futures = [store.add_turn("e", make_turn(f"t{index}")) for index in range(500)]
    store.close()
    store.close()
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(StoreError, match="closed"):
        store.seal("e", "finished")
    with pytest.raises(StoreError, match="closed"):
        store.load_episode("e")
    with Store.open(url, durability="power") as again:
        assert len(again.load_episode("e").turns) == 500


def test_a_foreign_or_broken_file_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE things (x)")
    with pytest.raises(StoreError, match="is not a store of areal-agents"):
        Store.open(tmp_path / "other.db")
    (tmp_path / "text.db").write_text("not a database, but long enough to be looked at " * 50)
    with pytest.raises(StoreError, match="cannot open"):
        Store.open(tmp_path / "text.db")
    for url in ("mysql://host/db", "sqlite://", "sqlite:///:memory:"):
        with pytest.raises(StoreError, match="SQLite file"):
            Store.open(url)


def test_a_turn_of_another_codec_is_refused(store: Store) -> None:
    open_episode(store, "e")
    store.add_turn("e", make_turn("a")).result()
    change = sqlalchemy.update(schema.turns).values(codec=99)
    store._database.submit(lambda c: c.execute(change).rowcount).result()
    with pytest.raises(StoreError, match="codec 99"):
        store.load_episode("e")


def test_loading_a_group_takes_a_handful_of_queries(store: Store) -> None:
    """The number of queries does not depend on the number of episodes or turns."""
    complete_group(store, "small@0", [0])
    complete_group(store, "large@0", [0] * 16)

    def queries(group_id: str) -> int:
        seen: list[str] = []

        def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
            seen.append(statement)

        sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", note)
        try:
            assert store.load_groups([group_id])[0].rollouts
        finally:
            sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", note)
        return len(seen)

    assert queries("large@0") == queries("small@0") <= 8


@pytest.fixture
def few_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make SQLite's limit, 32,766, and the chunks of ids a hundredth as large, so that 400 ids exceed it.

    The limit of PostgreSQL is 65,535.
    """

    def limit(connection: Any, record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 327)

    monkeypatch.setattr(chunks, "_MOST_IDS", chunks._MOST_IDS // 100)
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", limit)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", limit)


def test_a_batch_may_have_more_groups_than_a_statement_binds_variables(
    few_variables: None, tmp_path: Path
) -> None:
    with Store.open(tmp_path / "store.db") as store:
        lease_and_return_many(store, 400)


@pytest.mark.slow
def test_a_batch_may_have_many_groups_in_postgresql(postgres: PostgresServer) -> None:
    with Store.open(postgres.new_store()) as store:
        lease_and_return_many(store, 33_000)


def lease_and_return_many(store: Store, count: int) -> None:
    row = {"task_uid": "t", "split": "train", "created_at": 0.0}
    members = [
        {**row, "id": f"g{i}", "size": 1, "state": "complete", "completed_at": 0.0} for i in range(count)
    ]
    played = {
        **row,
        "index": 0,
        "status": "finished",
        "metadata": {},
        "limits": {},
        "sampling": {},
        "ended_at": 0.0,
    }
    attempts = [{**played, "id": f"e{i}", "key_hash": f"h{i}", "group_id": f"g{i}"} for i in range(count)]

    def fill(connection: sqlalchemy.Connection) -> None:
        connection.execute(sqlalchemy.insert(schema.tasks).values(uid="t", id="t", input={}))
        connection.execute(sqlalchemy.insert(schema.groups), members)
        connection.execute(sqlalchemy.insert(schema.episodes), attempts)

    store._database.submit(fill).result()
    leased = lease_groups(store, count, step=1)
    assert [group.id for group in leased] == [f"g{i}" for i in range(count)]
    assert [group.rollouts[0].episode.id for group in leased] == [f"e{i}" for i in range(count)]
    store.mark_trained([group.id for group in leased], step=1, version=1)
    assert store.group_counts()["trained"] == count
    store.return_leases(0)
    assert len(store.fail_unrewarded(store.unrewarded_episodes()).result()) == count
    targets = [Reward("turn", f"c{i}", "return", 1.0) for i in range(count)]
    open_episode(store, "e", None)
    with pytest.raises(NotFound, match="no completion c0"):
        store.set_rewards("e", targets).result()
