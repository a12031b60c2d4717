"""Writes versions of one run to a storage, and removes old ones.

Each upload has a folder of its own, v{version}-{random}, and its manifest is written last. A trainer that was
cut off from the store may still be running when its successor has started, so a trainer removes only folders
that it wrote itself, or that it found while it was the trainer: never one of its successor. Some versions are
whole, and the others consist of changes from the version before, so a whole one is kept as long as one that
needs it.
"""

from __future__ import annotations

import logging
import re
import secrets
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import StorageError
from areal_agents.object_storage.changes import word_bytes, write_changes
from areal_agents.object_storage.location import Location
from areal_agents.object_storage.manifest import (
    MANIFEST,
    Manifest,
    StoredFile,
    StoredVersion,
    checksum_of,
    file_checksum,
)

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"v(\d+)-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A version in the storage.

    Attributes:
        stored: what its row in the store says.
        folder: its folder on this machine.
    """

    manifest: Manifest
    stored: StoredVersion
    folder: Path


class Uploads:
    """The versions that one trainer writes.

    Args:
        location: the folder of the run.
        whole_every: every n-th version is whole, and the first one of each trainer.
        keep: the number of versions that are kept.
    """

    def __init__(self, location: Location, *, whole_every: int, keep: int) -> None:
        self._location = location
        self._whole_every, self._keep = whole_every, keep
        self._last: Uploaded | None = None
        self._since_whole = 0
        self._known: dict[str, _Known] = {}  # the folders of versions that this trainer may remove
        self._unfinished: set[str] = set()  # folders of uploads that no row will ever name
        self._was_listed = False

    def write(self, folder: Path, version: int) -> Uploaded:
        """Write a version's folder of this machine to the storage.

        Raises:
            StorageError: the storage does not take it, or the folder cannot be read.
        """
        last = self._last
        is_next = last is not None and last.folder.is_dir() and self._since_whole + 1 < self._whole_every
        before = last if is_next else None
        name = f"v{version}-{secrets.token_hex(6)}"
        there = self._location.child(name)
        self._remove(self._unfinished)  # which may have filled the storage
        self._unfinished.add(name)
        try:
            with tempfile.TemporaryDirectory(prefix=".changes-", dir=folder.parent) as own:
                manifest = _put_files(there, folder, version, before, Path(own))
        except OSError as error:
            raise StorageError(f"cannot read {folder} to write it to {there.url}: {error}") from error
        content = manifest.encoded()
        there.write(MANIFEST, content)
        self._last = Uploaded(manifest, StoredVersion(version, name, checksum_of(content)), folder)
        self._since_whole = 0 if before is None else self._since_whole + 1
        self._known[name] = _Known(version, is_whole=before is None)
        self._unfinished.remove(name)
        return self._last

    def forget_before(self, version: int) -> None:
        """Remove the versions up to `version` that are neither of the last ones nor needed by one of these.

        What cannot be removed now is tried again next time.
        """
        known = self._known.values()
        kept = sorted({one.version for one in known if one.version <= version})[-self._keep :]
        needed = max(
            (one.version for one in known if one.is_whole and kept and one.version <= kept[0]), default=-1
        )
        self._remove({name for name, one in self._known.items() if one.version < needed} | self._unfinished)

    def _remove(self, names: Collection[str]) -> None:
        for name in sorted(names):
            try:
                self._location.remove(name)
            except StorageError as error:
                logger.warning("%s could not be removed from the storage yet: %s", name, error)
            else:
                self._known.pop(name, None)
                self._unfinished.discard(name)

    def find_earlier(self, published: Callable[[], Collection[str]]) -> None:
        """Find once what earlier trainers have written; `write` removes what of it was never published.

        Args:
            published: returns the folders that rows of versions name; it raises an error if this process is
                not the trainer any more. It is called after the storage was listed, so that nothing in the
                list can be a successor's.
        """
        if self._was_listed:
            return
        found = {name: match for name in self._location.names() if (match := _FOLDER.fullmatch(name))}
        named = published()
        for name, match in found.items():
            if name in named:
                # Whether a version of an earlier trainer is whole does not matter: the first one here is.
                self._known[name] = _Known(int(match[1]), is_whole=False)
            else:
                self._unfinished.add(name)
        self._was_listed = True


@dataclass(frozen=True, slots=True)
class _Known:
    version: int
    is_whole: bool


def _put_files(there: Location, folder: Path, version: int, before: Uploaded | None, own: Path) -> Manifest:
    earlier = {} if before is None else {file.name: file for file in before.manifest.files}
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files.append(_put_file(there, path, name, earlier, before, own))
    needed = any(file.stored != "whole" for file in files)
    return Manifest(version, tuple(files), before.stored if before is not None and needed else None)


def _put_file(
    there: Location,
    path: Path,
    name: str,
    earlier: Mapping[str, StoredFile],
    before: Uploaded | None,
    own: Path,
) -> StoredFile:
    nbytes, checksum = path.stat().st_size, file_checksum(path)
    known = earlier.get(name)
    if known is not None and known.sha256 == checksum:
        return StoredFile(name, nbytes, checksum, "same", 0, "")
    if known is not None and before is not None and path.suffix == ".safetensors":
        word, changes = word_bytes(path), own / path.name
        if write_changes(before.folder / name, path, changes, word=word) is not None:
            size, of_changes = changes.stat().st_size, file_checksum(changes)
            file = StoredFile(name, nbytes, checksum, "changes", size, of_changes, word)
            there.put(file.object_name, changes)
            changes.unlink()
            return file
    there.put(name, path)
    return StoredFile(name, nbytes, checksum, "whole", nbytes, checksum)
