"""Writes versions of one run to a storage, and removes old ones.

Each is in a folder v{version}; its manifest is written last. Some versions are whole, and the others consist
of changes from the version before, so a whole one is kept as long as one that needs it.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import StorageError
from areal_agents.object_storage.changes import word_bytes, write_changes
from areal_agents.object_storage.location import Location
from areal_agents.object_storage.manifest import (
    MANIFEST,
    Manifest,
    StoredFile,
    checksum_of,
    file_checksum,
)

logger = logging.getLogger(__name__)

_VERSION = re.compile(r"v(\d+)")


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A version in the storage.

    Attributes:
        checksum: that of its manifest.
        folder: its folder on this machine.
    """

    manifest: Manifest
    checksum: str
    folder: Path


class Uploads:
    """The versions that one trainer writes; only one trainer of a run is running at a time.

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
        self._is_whole: dict[int, bool] | None = None  # of each version in the storage; None: not read yet

    def write(self, folder: Path, version: int) -> Uploaded:
        """Write a version's folder of this machine to the storage.

        Whatever an earlier trainer has left there under this number, which was never published, is removed.

        Raises:
            StorageError: the storage does not take it, or the folder cannot be read.
        """
        last = self._last
        is_next = last is not None and last.folder.is_dir() and self._since_whole + 1 < self._whole_every
        before = last if is_next else None
        there = self._location.child(f"v{version}")
        self._location.remove(f"v{version}")
        try:
            with tempfile.TemporaryDirectory(prefix=".changes-", dir=folder.parent) as own:
                manifest = _put_files(there, folder, version, before, Path(own))
        except OSError as error:
            raise StorageError(f"cannot read {folder} to write it to {there.url}: {error}") from error
        content = manifest.encoded()
        there.write(MANIFEST, content)
        self._last = Uploaded(manifest, checksum_of(content), folder)
        self._since_whole = 0 if before is None else self._since_whole + 1
        self._versions()[version] = before is None
        return self._last

    def forget_before(self, version: int) -> None:
        """Remove the versions up to `version` that are neither of the last ones nor needed by one of these.

        What cannot be removed now is tried again next time.
        """
        known = self._versions()
        kept = sorted(one for one in known if one <= version)[-self._keep :]
        needed = max((one for one in known if known[one] and one <= kept[0]), default=-1) if kept else -1
        for old in sorted(one for one in known if one < needed):
            try:
                self._location.remove(f"v{old}")
            except StorageError as error:
                logger.warning("version %d could not be removed from the storage yet: %s", old, error)
            else:
                del known[old]

    def forget_after(self, version: int) -> None:
        """Remove what a trainer that died wrote and never published: all above `version`."""
        known = self._versions()
        for unpublished in [one for one in known if one > version]:
            self._location.remove(f"v{unpublished}")
            del known[unpublished]

    def _versions(self) -> dict[int, bool]:
        if self._is_whole is None:
            names = (_VERSION.fullmatch(name) for name in self._location.names())
            # Whether a version of an earlier trainer is whole does not matter: the first one here is.
            self._is_whole = {int(match[1]): False for match in names if match is not None}
        return self._is_whole


def _put_files(there: Location, folder: Path, version: int, before: Uploaded | None, own: Path) -> Manifest:
    earlier = {} if before is None else {file.name: file for file in before.manifest.files}
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files.append(_put_file(there, path, name, earlier, before, own))
    needed = any(file.stored != "whole" for file in files)
    link = (before.manifest.version, before.checksum) if before is not None and needed else None
    return Manifest(version, tuple(files), link)


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
