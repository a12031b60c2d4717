"""`store.retain`: which turns are deleted, which never are, and that the disk gets its space back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from store_queries import lease_groups
from store_support import complete_group, make_turn, open_episode, reward

from areal_agents.core.completion import Completion
from areal_agents.errors import StoreError
from areal_agents.store import (
    NewEpisode,
    RetainConfig,
    Retention,
    Store,
    StoreConfig,
    retention,
    retention_job,
)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        opened.publish_version(0, step=0, path="v0")
        yield opened


def train(store: Store, step: int, *, checkpoint: bool = True, version: int | None = None) -> None:
    """Train one group in a step, as the trainer does."""
    complete_group(store, f"g{step}@0", [0.0, 1.0])
    (group,) = lease_groups(store, 1, step=step)
    number = step if version is None else version
    store.publish_version(number, step=step, path=f"v{number}")
    store.mark_trained([group.id], step=step, version=number)
    if checkpoint:
        store.commit_checkpoint(step)


def emptied(store: Store) -> set[str]:
    """Return the groups whose turns were deleted."""
    out = set()
    for summary in store.episodes():
        try:
            store.load_episode(summary.id)
        except StoreError as error:
            assert "were deleted (store.retain)" in str(error)
            out.add(str(summary.group_id))
    return out


def go_on(keeper: Retention) -> int:
    """Run until nothing is left to delete; return the number of deleted turns."""
    total = 0
    while count := keeper.run_once():
        total += count
    return total


def test_turns_of_the_last_versions_are_kept_and_of_older_ones_only_the_counts(store: Store) -> None:
    for step in range(1, 7):
        train(store, step)
    before = store.episodes()
    assert go_on(Retention(store, RetainConfig(versions=2))) == 4 * 4
    assert emptied(store) == {"g1@0", "g2@0", "g3@0", "g4@0"}
    assert store.episodes() == before  # rewards, turns, tokens, versions, status
    assert store.group_counts()["trained"] == 6
    assert go_on(Retention(store, RetainConfig(versions=2))) == 0


def test_turns_that_a_resume_could_train_again_are_never_deleted(store: Store) -> None:
    keeper = Retention(store, RetainConfig(versions=1))
    for step in range(1, 4):
        train(store, step, checkpoint=False)
    assert go_on(keeper) == 0  # there is no checkpoint
    store.commit_checkpoint(3)
    assert go_on(keeper) == 0  # the only one may be lost
    for step in range(4, 9):
        train(store, step, checkpoint=False)
    store.commit_checkpoint(8)
    go_on(keeper)
    assert emptied(store) == {"g1@0", "g2@0", "g3@0"}
    store.return_leases(after_step=3)  # the newest checkpoint was lost
    assert store.group_counts()["complete"] == 5
    assert [group.id for group in lease_groups(store, 5, step=4)] == [f"g{n}@0" for n in range(4, 9)]


def test_a_group_whose_turns_were_deleted_is_dropped_by_a_resume(store: Store) -> None:
    for step in range(1, 6):
        train(store, step)
    go_on(Retention(store, RetainConfig(versions=1)))
    assert store.return_leases(after_step=2) == 1  # three checkpoints were removed
    counts = store.group_counts()
    assert (counts["complete"], counts["trained"], counts["dropped"]) == (1, 2, 2)
    assert emptied(store) == {f"g{n}@0" for n in range(1, 5)}
    store.return_leases(after_step=2)
    assert store.group_counts() == counts


def test_versions_that_a_crash_lost_do_not_count_as_newer_steps(store: Store) -> None:
    for step in range(1, 5):
        train(store, step)
    store.publish_version(5, step=5, path="v5")  # lost with its trainer
    store.return_leases(after_step=4)
    store.publish_version(6, step=4, path="v6")
    go_on(Retention(store, RetainConfig(versions=2)))
    assert emptied(store) == {"g1@0", "g2@0", "g3@0"}


def test_a_run_is_bounded_and_open_episodes_are_left_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_job, "_GROUPS_PER_STEP", 2)
    for step in range(1, 8):
        train(store, step)
    complete_group(store, "waiting@0", [1.0])
    open_episode(store, "alone", group=None)
    store.add_turn("alone", make_turn("alone/a")).result()
    complete_group(store, "dropped@0", [1.0, 1.0])
    store.drop_group("dropped@0", "equal", step=1)
    keeper = Retention(store, RetainConfig(versions=1))
    assert keeper.run_once() == 8
    assert go_on(keeper) == 5 * 4
    assert emptied(store) == {f"g{n}@0" for n in range(1, 7)} | {"dropped@0"}
    store.set_rewards("alone", reward(1)).result()


def test_turns_are_exported_once_before_they_are_deleted(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "kept"
    config = RetainConfig(versions=1, export=str(out))
    for step in range(1, 4):
        train(store, step)
    turns = {t.id: t for n in (1, 2) for i in range(2) for t in store.load_episode(f"g{n}@0/{i}").turns}
    assert go_on(Retention(store, config)) == 8
    (path,) = out.iterdir()
    rows = parquet.read_table(path).to_pylist()
    assert {row["turn_id"] for row in rows} == set(turns)
    for row in rows:
        turn = turns[row["turn_id"]]
        assert (row["parent"], row["score"]) == (turn.parent, float(row["index"]))
        assert row["token_ids"] == turn.completion.token_ids.tolist()
        assert row["versions"] == turn.completion.versions.tolist()
        assert row["recorded_before"] == turn.recorded_before
        np.testing.assert_array_equal(np.float32(row["logprobs"]), turn.completion.logprobs)
    train(store, 4)
    go_on(Retention(store, config))
    assert [len(parquet.read_table(file)) for file in sorted(out.iterdir())] == [8, 4]


def test_a_death_between_export_and_deletion_exports_nothing_twice(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "kept"
    config = RetainConfig(versions=1, export=str(out))
    for step in range(1, 4):
        train(store, step)
    with monkeypatch.context() as dying:
        dying.setattr(Store, "empty_groups", lambda *_, **__: (_ for _ in ()).throw(StoreError("killed")))
        with pytest.raises(StoreError, match="killed"):
            Retention(store, config).run_once()
    assert emptied(store) == set()
    train(store, 4)  # so that another run would select other groups
    go_on(Retention(store, config))
    assert [len(parquet.read_table(file)) for file in sorted(out.iterdir())] == [8, 4]


def test_nothing_is_deleted_if_the_export_fails(store: Store, tmp_path: Path) -> None:
    for step in range(1, 4):
        train(store, step)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot export turns"):
        Retention(store, RetainConfig(versions=1, export=str(tmp_path / "file"))).run_once()
    assert emptied(store) == set()


def test_invalid_settings_are_refused() -> None:
    assert StoreConfig.model_validate({"retain": "all"}) == StoreConfig()
    assert StoreConfig.model_validate({"retain": {"versions": 2}}).retain.versions == 2
    for wrong, said in (
        ("most", "must be all or"),
        ({"export": "x"}, "versions: N"),
        ({"versions": 0}, "1"),
    ):
        with pytest.raises(ValueError, match=said):
            StoreConfig.model_validate({"retain": wrong})


def test_the_disk_gets_its_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_SPARE_PAGES", 16)
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.publish_version(0, step=0, path="v0")
        for step in range(1, 6):
            store.open_episode(NewEpisode(f"e{step}", f"k{step}", None, f"g{step}", 1)).result()
            completion = Completion(np.arange(50_000), -np.ones(50_000), np.zeros(50_000, int), "stop")
            turn = dataclasses.replace(make_turn(f"t{step}"), completion=completion)
            store.add_turn(f"e{step}", turn).result()
            store.seal(f"e{step}", "finished", given=reward(1)).result()
            lease_groups(store, 1, step=step)
            store.publish_version(step, step=step, path="v")
            store.mark_trained([f"g{step}"], step=step, version=step)
            store.commit_checkpoint(step)
    full = path.stat().st_size
    with Store.open(path) as store:
        assert go_on(Retention(store, RetainConfig(versions=1))) == 4
    assert full > 3_000_000 and path.stat().st_size < full / 3
