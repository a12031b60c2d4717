"""Versions in a storage: a fetched version equals the written one byte for byte, or nothing is kept."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_agents.errors import ConfigError, StorageError
from areal_agents.object_storage import location
from areal_agents.object_storage.changes import apply_changes, write_changes
from areal_agents.object_storage.fetched import FetchedVersions
from areal_agents.object_storage.location import Location
from areal_agents.object_storage.manifest import Manifest, StoredFile, StoredVersion, checksum_of
from areal_agents.object_storage.uploads import Uploaded, Uploads

SIZE = 200_000  # weights, in several blocks of changes


@pytest.fixture
def there(tmp_path: Path) -> Location:
    return Location.open(f"file://{tmp_path}/bucket/run")


def fetched(there: Location, folder: Path) -> FetchedVersions:
    return FetchedVersions(folder, there, threading.Event())


def write_folder(weights: Path, version: int, changed: int) -> Path:
    """Write the folder of a version: the first `changed` weights differ from those of version 0."""
    folder = weights / f"v{version}"
    folder.mkdir(parents=True)
    values = np.arange(SIZE, dtype=np.float32)
    values[:changed] += version
    save_file({"w": values, "kept": np.ones(10, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def write_all(uploads: Uploads, weights: Path, changed: Mapping[int, int]) -> list[Uploaded]:
    return [uploads.write(write_folder(weights, version, few), version) for version, few in changed.items()]


def versions(there: Location) -> list[int]:
    """The versions in the storage; each is in one folder."""
    return sorted(int(name[1:].partition("-")[0]) for name in there.names())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_late_engine_gets_the_last_whole_version_and_the_changes_since(
    there: Location, tmp_path: Path
) -> None:
    uploads = Uploads(there, whole_every=3, keep=2)
    written = write_all(uploads, tmp_path / "weights", {0: 0, 1: 500, 2: 600, 3: 700, 4: 800})
    stored = [{file.name: file.stored for file in one.manifest.files} for one in written]
    whole = {"config.json": "whole", "model.safetensors": "whole"}
    changes = {"config.json": "same", "model.safetensors": "changes"}
    assert stored == [whole, changes, changes, whole, changes]
    assert written[1].manifest.stored_bytes == 500 * 6 + 4 * 4  # positions and values; four blocks

    early, late = (fetched(there, tmp_path / name) for name in ("early", "late"))
    for one in written[:3]:
        path = early.fetch(one.stored)
        assert content(path) == content(one.folder)
    assert early.received_bytes == sum(one.manifest.stored_bytes for one in written[:3])
    assert content(late.fetch(written[4].stored)) == content(written[4].folder)
    assert late.received_bytes == written[3].manifest.stored_bytes + written[4].manifest.stored_bytes

    uploads.forget_before(4)  # two versions are kept, and 4 needs 3
    assert versions(there) == [3, 4]
    assert early.forget_before(2, keep=1) == [0, 1]
    assert sorted(path.name for path in (tmp_path / "early").iterdir()) == ["v2", "v2.json"]


def test_changes_that_are_needed_are_kept(there: Location, tmp_path: Path) -> None:
    uploads = Uploads(there, whole_every=4, keep=2)
    written = write_all(uploads, tmp_path / "weights", {0: 0, 1: 1, 2: 2})
    uploads.forget_before(2)
    assert there.names() == [one.stored.folder for one in written]
    published = {one.stored.folder for one in written[:2]}  # the row of version 2 was never written
    again = Uploads(there, whole_every=4, keep=2)  # of a restarted trainer
    again.find_earlier(lambda: published)
    assert {one.stored.folder for one in write_all(again, tmp_path / "other", {2: 5})} | published == {
        *there.names()
    }
    write_all(again, tmp_path / "other", {3: 5})
    again.forget_before(3)
    assert versions(there) == [2, 3]


def test_a_trainer_that_was_cut_off_removes_no_version_of_its_successor(
    there: Location, tmp_path: Path
) -> None:
    cut_off, successor = (Uploads(there, whole_every=4, keep=1) for _ in range(2))
    cut_off.find_earlier(set)
    [first] = write_all(cut_off, tmp_path / "weights", {0: 0})
    successor.find_earlier(lambda: {first.stored.folder})
    published = write_all(successor, tmp_path / "successor", {1: 10, 2: 20})
    # The first trainer has noticed nothing yet, and writes the same versions; their rows are refused.
    late = write_all(cut_off, tmp_path / "weights", {1: 30, 2: 40})
    cut_off.find_earlier(set)
    cut_off.forget_before(2)
    engine = fetched(there, tmp_path / "engine")
    assert content(engine.fetch(published[1].stored)) == content(published[1].folder)
    assert content(engine.fetch(late[1].stored)) == content(late[1].folder)  # from its own chain of changes


def test_a_trainer_that_was_replaced_removes_only_its_own_versions(there: Location, tmp_path: Path) -> None:
    [other] = write_all(Uploads(there, whole_every=1, keep=1), tmp_path / "weights", {0: 0})

    def refuse() -> set[str]:
        raise RuntimeError("another process is the trainer")

    uploads = Uploads(there, whole_every=1, keep=1)
    with pytest.raises(RuntimeError):
        uploads.find_earlier(refuse)
    write_all(uploads, tmp_path / "late", {1: 0, 2: 0})
    uploads.forget_before(2)
    assert versions(there) == [0, 2] and there.names()[0] == other.stored.folder


Damage = Callable[[Path], None]


def shorten(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def flip(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"?")


def replace_manifest(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"stored": "whole"', '"stored": "same"'))


def unfinished(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shorten, "model.safetensors has less than"),
        (flip, "model.safetensors is not what was published"),
        (replace_manifest, "manifest.json is not what the trainer published"),
        (unfinished, "manifest.json: FileNotFoundError"),
    ],
)
def test_a_version_that_differs_from_the_published_one_is_not_kept(
    there: Location, tmp_path: Path, damage: Damage, said: str
) -> None:
    [one] = write_all(Uploads(there, whole_every=1, keep=2), tmp_path / "weights", {0: 0})
    stored = Path(there.path) / one.stored.folder
    good = content(stored)
    damage(stored)
    engine = fetched(there, tmp_path / "engine")
    with pytest.raises(StorageError, match=said):
        engine.fetch(one.stored)
    assert list((tmp_path / "engine").iterdir()) == []
    for name, found in good.items():
        (stored / name).write_bytes(found)
    assert content(engine.fetch(one.stored)) == content(one.folder)


def test_a_folder_of_an_earlier_process_is_used_if_it_is_still_complete(
    there: Location, tmp_path: Path
) -> None:
    [one] = write_all(Uploads(there, whole_every=1, keep=2), tmp_path / "weights", {0: 0})
    path = fetched(there, tmp_path / "engine").fetch(one.stored)
    (tmp_path / "engine" / ".v1.1.part").mkdir()  # the process was killed while it fetched the next version
    second = fetched(there, tmp_path / "engine")
    assert second.fetch(one.stored) == path and second.received_bytes == 0
    assert not (tmp_path / "engine" / ".v1.1.part").exists()
    flip(path)
    third = fetched(there, tmp_path / "engine")
    assert content(third.fetch(one.stored)) == content(one.folder) and third.received_bytes > 0


def test_a_file_that_is_damaged_on_the_machine_of_the_engine_is_fetched_again(
    there: Location, tmp_path: Path
) -> None:
    first, second = write_all(Uploads(there, whole_every=3, keep=2), tmp_path / "weights", {0: 0, 1: 5})
    engine = fetched(there, tmp_path / "engine")
    flip(engine.fetch(first.stored))
    with pytest.raises(StorageError, match=r"model.safetensors is not what was published after its changes"):
        engine.fetch(second.stored)
    assert content(engine.fetch(second.stored)) == content(second.folder)


def test_a_file_that_cannot_be_written_is_an_error_and_nothing_is_kept(
    there: Location, tmp_path: Path
) -> None:
    [one] = write_all(Uploads(there, whole_every=1, keep=2), tmp_path / "weights", {0: 0})
    engine = fetched(there, tmp_path / "engine")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))  # the weights have four times as many bytes
    try:
        with pytest.raises(StorageError, match=r"cannot keep weights in .*model.safetensors: File too large"):
            engine.fetch(one.stored)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "engine").iterdir()) == []


def test_a_manifest_with_a_file_outside_its_folder_is_refused(there: Location, tmp_path: Path) -> None:
    file = StoredFile("../../x", 1, checksum_of(b"x"), "whole", 1, checksum_of(b"x"))
    written = Manifest(0, (file,)).encoded()
    there.child("v0").write("manifest.json", written)
    there.child("v0").write("../../x", b"x")
    with pytest.raises(StorageError, match="not in the folder of its version"):
        fetched(there, tmp_path / "engine").fetch(StoredVersion(0, "v0", checksum_of(written)))


def test_a_manifest_of_another_version_is_refused(there: Location, tmp_path: Path) -> None:
    [one] = write_all(Uploads(there, whole_every=1, keep=1), tmp_path / "weights", {0: 0})
    with pytest.raises(StorageError, match="is the manifest of version 0, expected 1"):
        fetched(there, tmp_path / "engine").fetch(StoredVersion(1, one.stored.folder, one.stored.checksum))


def test_a_manifest_that_is_too_large_is_not_read(
    there: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "_MOST_SMALL", 1 << 20)
    there.child("v0").write("manifest.json", b" " * (2 << 20))
    with pytest.raises(StorageError, match="has more than 1 MiB"):
        fetched(there, tmp_path / "engine").fetch(StoredVersion(0, "v0", "of nothing"))


@pytest.mark.parametrize("word", [2, 4, 8])
@pytest.mark.parametrize("changed", [0, 1, 20_000, 150_000])
def test_changes_reproduce_the_file(tmp_path: Path, word: int, changed: int) -> None:
    numbers = np.random.default_rng(0)
    words = numbers.integers(0, 1 << 15, SIZE).astype(f"<u{word}")  # in four blocks
    before, after = words.tobytes() + b"tai", words.copy()
    # Most changes are in the first blocks, which are then written whole.
    after[np.sort(numbers.choice(SIZE, changed, replace=False) ** 2 // SIZE)] += 1
    for name, found in {"before": before, "after": after.tobytes() + b"end"}.items():
        (tmp_path / name).write_bytes(found[: -3 + word - 1] if word < 4 else found)
    paths = [tmp_path / name for name in ("before", "after", "changes", "made")]
    count = write_changes(paths[0], paths[1], paths[2], word=word)
    if count is None:
        assert changed == 150_000 and not paths[2].exists()
        return
    assert count == np.count_nonzero(after != words)
    apply_changes(paths[0], paths[2], paths[3], word=word)
    assert paths[3].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nosuch://bucket/x", "cannot be opened"),
        ("file:///proc/no/such/folder", "cannot write"),
    ],
)
def test_a_location_that_cannot_be_used_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Location.open(url).check()


def test_the_check_of_a_location_leaves_no_file(there: Location) -> None:
    there.check()
    assert there.names() == []
