"""The manifest of a version in a storage: the files of its folder, and what of them is stored.

It is written after all that it names, and the row of the version in the store has its checksum. So a version
that is incomplete, or was overwritten, is never taken for the one that was published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from areal_agents.errors import StorageError

MANIFEST = "manifest.json"
_FORMAT = 1
_PIECE = 8 << 20  # bytes

# whole: the file itself; same: nothing, as the file is that of the version before; changes: those from it
Stored = Literal["whole", "same", "changes"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a version's folder.

    Attributes:
        name: its path in the folder. nbytes, sha256: of the file, as it is after changes were applied.
        stored: what of it is in the storage.
        stored_bytes, stored_sha256: of the object in the storage; 0 and "" if there is none.
        word: with changes, the size of a word in bytes.
    """

    name: str
    nbytes: int
    sha256: str
    stored: Stored
    stored_bytes: int
    stored_sha256: str
    word: int = 0

    @property
    def object_name(self) -> str:
        """The name of the object in the folder of the version."""
        return f"{self.name}.changes" if self.stored == "changes" else self.name


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """Where a version is in the storage, as its row in the store says.

    Attributes:
        folder: the name of its folder, in which nothing else is ever written.
        checksum: that of its manifest.
    """

    version: int
    folder: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version consists of.

    Attributes:
        before: the version that its files are partly those of; None: the version is whole.
    """

    version: int
    files: tuple[StoredFile, ...]
    before: StoredVersion | None = None

    @property
    def stored_bytes(self) -> int:
        """The size of its objects in the storage, in bytes."""
        return sum(file.stored_bytes for file in self.files)

    def encoded(self) -> bytes:
        """Return the content of the object."""
        before = None if self.before is None else asdict(self.before)
        fields = {"format": _FORMAT, "version": self.version, "before": before}
        return json.dumps({**fields, "files": [asdict(file) for file in self.files]}, indent=1).encode()

    @classmethod
    def decoded(cls, content: bytes, where: str) -> Manifest:
        """Read the content of the object, which `where` names in errors."""
        try:
            found: Mapping[str, Any] = json.loads(content)
            if found["format"] != _FORMAT:
                raise StorageError(
                    f"{where} has format {found['format']}, and this release reads {_FORMAT}; use the same "
                    "release of areal-agents everywhere"
                )
            before = found["before"]
            files = tuple(StoredFile(**file) for file in found["files"])
            return cls(found["version"], files, None if before is None else StoredVersion(**before))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{where} is not the manifest of a version: {error!r}") from error


def checksum_of(content: bytes) -> str:
    """Return the SHA-256 in hex digits."""
    return sha256(content).hexdigest()


def file_checksum(file: Path) -> str:
    """Return the SHA-256 of a file in hex digits."""
    found = sha256()
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            found.update(piece)
    return found.hexdigest()
