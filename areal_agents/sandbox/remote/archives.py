"""Folders that travel: packed as tar archives, and kept by the host under the digest of their content."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import secrets
import tarfile
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from areal_agents.errors import SandboxError
from areal_agents.folders import remove_folder
from areal_agents.sandbox.remote.messages import MOST_DATA

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

KEPT_FOLDERS = 64  # of which no sandbox works in a copy; the least recently used ones are removed


def packed(folder: Path, *, most_bytes: int = MOST_DATA) -> bytes:
    """Return a folder as an archive.

    Raises:
        SandboxError: it cannot be read, or its archive is longer than `most_bytes`, of which no more is made.
    """
    data = _BoundedBytes(most_bytes)
    with _errors_translated(), tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(folder, arcname=".")
    return data.getvalue()


class _BoundedBytes(io.BytesIO):
    """A file in memory that takes at most so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    def write(self, data: ReadableBuffer) -> int:
        if self.tell() + memoryview(data).nbytes > self._most_bytes:
            raise SandboxError(
                "a folder cannot be copied to another machine: it has more than the "
                f"{self._most_bytes / 2**20:.4g} MiB that can be sent at once"
            )
        return super().write(data)


def unpack(data: bytes, folder: Path, *, is_trusted: bool) -> None:
    """Unpack an archive; no member can lie outside the folder.

    Args:
        is_trusted: whether links may lead out of the folder; not so if a sandbox could write the files.

    Raises:
        SandboxError: the archive has a member that would lie outside, or such a link, or a file cannot be
            written.
    """
    with _errors_translated(), tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        archive.extractall(folder, filter="tar" if is_trusted else "data")


def replace_content(folder: Path, data: bytes) -> None:
    """Replace what a folder contains by an archive that a sandbox could write.

    Raises:
        SandboxError: see `unpack`; the folder is then as it was, unless the disk has failed in between.
    """
    with _errors_translated(), tempfile.TemporaryDirectory(dir=folder, prefix=".areal-agents-") as new:
        unpack(data, Path(new), is_trusted=False)
        for old in list(folder.iterdir()):
            if old == Path(new):
                continue
            if old.is_dir() and not old.is_symlink():
                remove_folder(old)
            else:
                old.unlink()
        for path in list(Path(new).iterdir()):
            path.rename(folder / path.name)


class Digests:
    """The digests of folders, each read again only after one of its files has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[bytes, str]] = {}

    def of(self, folder: Path) -> str:
        """Return a digest of the names, the modes and the content of all files of a folder."""
        seen = hashlib.sha256()
        for path, status in _entries(folder):
            seen.update(_name(path) + f"\0{status.st_mode} {status.st_size} {status.st_mtime_ns}\0".encode())
        known = self._known.get(folder)
        if known is not None and known[0] == seen.digest():
            return known[1]
        digest = _digest(folder)
        self._known[folder] = (seen.digest(), digest)
        return digest


class KeptFolders:
    """The unpacked folders of a host by their digests.

    Only the event loop changes what is recorded; threads unpack and remove.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: OrderedDict[str, Path] = OrderedDict()  # the least recently used first
        self._users: Counter[str] = Counter()

    def hold(self, digest: str) -> Path | None:
        """Return a folder, which is kept until `release`; None if it is not here."""
        folder = self._folders.get(digest)
        if folder is not None:
            self._folders.move_to_end(digest)
            self._users[digest] += 1
        return folder

    def release(self, digest: str) -> None:
        """Let a held folder go."""
        self._users[digest] -= 1

    async def add(self, digest: str, archive: bytes) -> None:
        """Unpack a folder; two callers may do so for one digest at the same time.

        Raises:
            SandboxError: see `unpack`; nothing is left of the folder.
        """
        folder = self._root / secrets.token_hex(8)  # a digest, which another machine gives, names no file
        await asyncio.to_thread(_unpack_whole, archive, folder)
        if self._folders.setdefault(digest, folder) != folder:
            await asyncio.to_thread(remove_folder, folder)

    async def remove_unused(self) -> None:
        """Remove the folders beyond KEPT_FOLDERS that nobody holds."""
        unused = [digest for digest in self._folders if not self._users[digest]]
        removed = [self._folders.pop(digest) for digest in unused[: max(0, len(unused) - KEPT_FOLDERS)]]
        if removed:
            await asyncio.to_thread(_remove, removed)


@contextlib.contextmanager
def _errors_translated() -> Iterator[None]:
    try:
        yield
    except (OSError, tarfile.TarError) as error:
        raise SandboxError(f"a folder cannot be copied to another machine: {error}") from error


def _unpack_whole(archive: bytes, folder: Path) -> None:
    """Unpack an archive into a new folder, of which nothing is left if that fails."""
    try:
        with _errors_translated():
            folder.mkdir(parents=True)
        unpack(archive, folder, is_trusted=True)
    except SandboxError:
        remove_folder(folder)
        raise


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        remove_folder(folder)


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path of each entry below a folder, sorted, relative to it, and its status."""
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted((*folders, *files)):
            path = Path(root, name)
            yield str(path.relative_to(folder)), path.lstat()


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for name, status in _entries(folder):
        path = folder / name
        found.update(_name(name) + f"\0{status.st_mode}\0".encode())
        if path.is_symlink():
            found.update(_name(os.readlink(path)))
        elif path.is_file():
            with open(path, "rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _name(path: str) -> bytes:
    return path.encode(errors="surrogateescape")
