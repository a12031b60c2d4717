"""A file is replaced by a complete one or stays as it is, whatever fails while it is written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from areal_agents.whole_files import replacing, write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "one")
    write_whole(path, "zwölf")
    assert path.read_text(encoding="utf-8") == "zwölf"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_stays_as_it_is_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "one")
    with pytest.raises(RuntimeError, match="disk"), replacing(path) as temporary:
        temporary.write_text("tw")
        assert path.read_text() == "one"
        raise RuntimeError("the disk is full")
    assert path.read_text() == "one"
    assert [*tmp_path.iterdir()] == [path]


def test_a_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_whole(path, "public")
    write_whole(path, "secret", private=True)
    assert path.stat().st_mode & 0o777 == 0o600


def test_concurrent_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    contents = [str(number) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write_whole, args=(path, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert path.read_text() in contents
    assert [*tmp_path.iterdir()] == [path]
