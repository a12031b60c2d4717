"""Which process may use a run folder and its store, and what `--fresh` sets aside."""

from __future__ import annotations

from pathlib import Path

import pytest
from postgres_server import PostgresServer

from areal_agents.errors import ConfigError, StoreError
from areal_agents.launch import run_folder
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Conflict, Store


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of an earlier run."""
    made = RunFolder(tmp_path / "run")
    with made.locked():
        made.config.write_text("name: earlier")
    return made


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_a_fresh_run_sets_a_store_outside_the_run_folder_aside(
    folder: RunFolder, tmp_path: Path, form: str
) -> None:
    path = tmp_path / "elsewhere" / "my.db"
    path.parent.mkdir()
    url = form.format(path)
    store = Store.open(url)
    store.publish_version(3, step=3, path="v3")
    earlier, earlier_store = folder.set_aside(url)  # committed rows may still be only in the -wal file
    store.close()
    assert (Path(earlier) / "config.yaml").exists() and not folder.root.exists()
    with Store.open(url) as anew, Store.open(earlier_store) as kept:
        assert (anew.max_version(), kept.max_version()) == (-1, 3)


def test_a_store_inside_the_run_folder_is_moved_with_it(folder: RunFolder) -> None:
    url = str(folder.root / "mine.db")
    Store.open(url).close()
    (earlier,) = folder.set_aside(url)
    assert (Path(earlier) / "mine.db").exists()


def test_a_fresh_run_renames_its_schema(folder: RunFolder) -> None:
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    with PostgresServer() as server:
        url = server.new_store()
        with Store.open(url) as store:
            store.publish_version(3, step=3, path="v3")
        earlier, earlier_store = folder.set_aside(url)
        assert Path(earlier).exists() and not folder.root.exists()
        with Store.open(url) as anew, Store.open(earlier_store) as kept:
            assert (anew.max_version(), kept.max_version()) == (-1, 3)


def test_the_folder_is_kept_if_the_database_server_cannot_be_reached(folder: RunFolder) -> None:
    with pytest.raises(StoreError, match="cannot be reached") as error:
        folder.set_aside("postgresql://user:secret@127.0.0.1:1/db")
    assert "secret" not in str(error.value)
    assert folder.root.exists()


def test_two_run_folders_cannot_share_a_store(folder: RunFolder, tmp_path: Path) -> None:
    url = str(tmp_path / "shared.db")
    Store.open(url).close()
    with folder.locked(url):
        other = RunFolder(tmp_path / "other")
        with (
            pytest.raises(ConfigError, match="another run is using the store"),
            other.locked(f"sqlite:///{url}"),
        ):
            pass
        with pytest.raises(ConfigError, match="another run is using the store"):
            other.set_aside(url)
    with other.locked(url):
        pass


@pytest.mark.parametrize("through_a_link", [False, True])
def test_the_store_in_a_run_folder_cannot_be_used_by_another_run(
    folder: RunFolder, tmp_path: Path, through_a_link: bool
) -> None:
    path = folder.store
    if through_a_link:
        path = tmp_path / "link.db"
        path.symlink_to(folder.store)
    with (
        folder.locked(),
        pytest.raises(ConfigError, match="another run is using the store"),
        RunFolder(tmp_path / "other").locked(str(path)),
    ):
        pass


def test_nothing_is_set_aside_while_a_trainer_is_still_ending(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "ENDING_TRAINER_S", 0.05)
    with Store.open(folder.store) as store:
        store.become_trainer()
        with pytest.raises(Conflict, match="is training on"):
            folder.set_aside()
    assert len(folder.set_aside()) == 1


def test_the_wall_time_of_a_resumed_run_is_added_to_the_earlier_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.add_wall_s(2.5) == 2.5
    assert folder.add_wall_s(0.25) == 2.75
