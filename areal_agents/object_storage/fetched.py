"""The folders of versions that this machine has fetched from a storage.

A folder has its name v{version} only once every file in it has the size and the checksum of the manifest,
whose own checksum is in the row of the version. The manifest is kept beside it, so that a later process knows
whether the folder is still what it was.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path, PurePosixPath

from areal_agents.errors import StorageError
from areal_agents.object_storage.changes import apply_changes
from areal_agents.object_storage.location import Location
from areal_agents.object_storage.manifest import (
    MANIFEST,
    Manifest,
    StoredFile,
    StoredVersion,
    checksum_of,
    file_checksum,
)

_LONGEST_CHAIN = 10_000  # versions that are changes of one another


class FetchedVersions:
    """The versions in one folder of this machine, which one process uses.

    Args:
        folder: the folder; it is created.
        location: the folder of the run in the storage.
        stop: ends a fetch with a StorageError.
    """

    def __init__(self, folder: Path, location: Location, stop: threading.Event) -> None:
        self._folder, self._location, self._stop = folder, location, stop
        self._complete: dict[int, str] = {}  # checksum of the manifest of each version that was checked
        self.received_bytes = 0
        with _local(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".*.part"):
                shutil.rmtree(left)

    def fetch(self, stored: StoredVersion) -> Path:
        """Return the folder of a version on this machine, and fetch what is missing.

        Raises:
            StorageError: it cannot be read, differs from what was published, or does not fit on the disk.
        """
        missing: list[tuple[StoredVersion, Manifest, bytes]] = []
        wanted: StoredVersion | None = stored
        while wanted is not None and not self._has(wanted.version, wanted.checksum):
            manifest, content = self._manifest(wanted)
            missing.append((wanted, manifest, content))
            wanted = manifest.before
            if len(missing) > _LONGEST_CHAIN:
                raise StorageError(
                    f"{self._location.url}: the changes of version {stored.version} have no beginning"
                )
        for one, manifest, content in reversed(missing):
            self._build(one, manifest, content)
        return self._path(stored.version)

    def forget_before(self, version: int, *, keep: int) -> list[int]:
        """Remove all versions up to `version` but the last `keep`, and return those removed."""
        found = sorted(
            int(path.name[1:])
            for path in self._folder.glob("v*")
            if path.is_dir() and path.name[1:].isdigit() and int(path.name[1:]) <= version
        )
        with _local(self._folder):
            for old in found[:-keep]:
                self._complete.pop(old, None)
                self._kept_manifest(old).unlink(missing_ok=True)
                shutil.rmtree(self._path(old))
        return found[:-keep]

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version}"

    def _kept_manifest(self, version: int) -> Path:
        return self._folder / f"v{version}.json"

    def _has(self, version: int, checksum: str) -> bool:
        """Whether the folder of a version is here and complete; one of an earlier process is read once."""
        if self._complete.get(version) == checksum:
            return True
        kept = self._kept_manifest(version)
        with _local(self._folder):
            if not kept.is_file() or checksum_of(content := kept.read_bytes()) != checksum:
                return False
            manifest, path = Manifest.decoded(content, str(kept)), self._path(version)
            files = [(file, path / _safe(file.name)) for file in manifest.files]
            if not all(found.is_file() and file_checksum(found) == file.sha256 for file, found in files):
                return False
        self._complete[version] = checksum
        return True

    def _manifest(self, stored: StoredVersion) -> tuple[Manifest, bytes]:
        there = self._location.child(stored.folder)
        content = there.read(MANIFEST)
        if checksum_of(content) != stored.checksum:
            raise StorageError(
                f"{there.url}/{MANIFEST} is not what the trainer published: its checksum is "
                f"{checksum_of(content)[:12]}…, expected {stored.checksum[:12]}…"
            )
        manifest = Manifest.decoded(content, f"{there.url}/{MANIFEST}")
        if manifest.version != stored.version:
            raise StorageError(
                f"{there.url}/{MANIFEST} is the manifest of version {manifest.version}, expected "
                f"{stored.version}"
            )
        return manifest, content

    def _build(self, stored: StoredVersion, manifest: Manifest, content: bytes) -> None:
        """Make the folder of a version; the one before it, if it needs it, is here."""
        part = self._folder / f".v{stored.version}.{os.getpid()}.part"
        path, kept = self._path(stored.version), self._kept_manifest(stored.version)
        there = self._location.child(stored.folder)
        before = self._path(manifest.before.version) if manifest.before is not None else None
        try:
            with _local(part):
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
            for file in manifest.files:
                self._build_file(there, file, part, before)
            with _local(path):
                kept.unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
                part.rename(path)
                kept.write_bytes(content)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)  # frees the space, since the disk may be full
            if manifest.before is not None:  # its files may be damaged, so they are read again next time
                self._complete.pop(manifest.before.version, None)
            raise
        self._complete[stored.version] = stored.checksum

    def _build_file(self, there: Location, file: StoredFile, part: Path, before: Path | None) -> None:
        target = part / _safe(file.name)
        with _local(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        if file.stored == "whole":
            self._download(there, file, target)
            return
        if before is None:
            raise StorageError(f"{there.url}/{MANIFEST} has changes of no version")
        if file.stored == "same":
            with _local(target):
                shutil.copyfile(before / _safe(file.name), target)
        else:
            changes = part / f"{target.name}.changes"
            self._download(there, file, changes)
            with _local(target):
                apply_changes(before / _safe(file.name), changes, target, word=file.word)
                changes.unlink()
        if file_checksum(target) != file.sha256:
            raise StorageError(f"{there.url}: {file.name} is not what was published after its changes")

    def _download(self, there: Location, file: StoredFile, target: Path) -> None:
        found = sha256()
        with _local(target), target.open("wb") as out:
            for block in there.blocks(file.object_name, file.stored_bytes):
                if self._stop.is_set():
                    raise StorageError("this process ends")
                found.update(block)
                out.write(block)
                self.received_bytes += len(block)
        if found.hexdigest() != file.stored_sha256:
            raise StorageError(
                f"{there.url}/{file.object_name} is not what was published: its SHA-256 is "
                f"{found.hexdigest()[:12]}…, expected {file.stored_sha256[:12]}…"
            )


def _safe(name: str) -> PurePosixPath:
    """Return the path of a file in its folder. StorageError if it leads out of it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise StorageError(f"a manifest names the file {name!r}, which is not in the folder of its version")
    return path


@contextmanager
def _local(path: Path) -> Iterator[None]:
    """Raise an error of this machine's disk as a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot keep weights in {path}: {error.strerror or error}") from error
