"""A folder of an object storage, or of a file system, that fsspec opens by its URL.

Every failure of a storage, whichever library raises it, becomes a StorageError that names the object. Keys
and passwords come from the environment, as the library of the storage reads them; a URL has none.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.errors import ConfigError, StorageError
from areal_agents.extras import require

_BLOCK = 16 << 20  # bytes of one request
_REQUESTS = 4  # of one file at a time
_MOST_SMALL = 64 << 20  # bytes of a manifest, which has a few hundred for each file
# Without these, a host that answers nothing holds a request for minutes.
_OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}},
}


@dataclass(frozen=True, slots=True)
class Location:
    """A folder of a storage.

    Attributes:
        url: its URL, for messages.
        system: the file system of fsspec.
        path: its path there.
    """

    url: str
    system: Any
    path: str

    @classmethod
    def open(cls, url: str) -> Location:
        """Return the folder at a URL such as s3://bucket/prefix; nothing is read or written yet.

        Raises:
            ConfigError: no installed package opens such a URL.
        """
        require("fsspec", "trainer.publish.location")
        import fsspec  # type: ignore[import-untyped]

        scheme = url.partition("://")[0]
        if scheme == "s3":
            require("s3fs", f"trainer.publish.location: {url}")
        try:
            system, path = fsspec.core.url_to_fs(url, **_OPTIONS.get(scheme, {}))
        except (ImportError, ValueError) as error:
            raise ConfigError(f"trainer.publish.location: {url} cannot be opened: {error}") from None
        except Exception as error:  # of the library of the storage, which looks for its keys
            raise ConfigError(_text(f"trainer.publish.location: {url} cannot be opened", error)) from error
        return cls(url.rstrip("/"), system, path.rstrip("/"))

    def check(self) -> None:
        """Write, read and remove a small object. ConfigError, with the reason, if that fails."""
        name, content = f"probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
        try:
            self.write(name, content)
            found = self.read(name)
            self.remove(name)
        except StorageError as error:
            raise ConfigError(
                f"trainer.publish.location: {error}. The bucket must exist, and the environment of every "
                "process needs the keys of the storage (docs/clusters.md)"
            ) from error
        if found != content:
            raise ConfigError(f"trainer.publish.location: {self.url} does not return what was written to it")

    def child(self, name: str) -> Location:
        """Return a folder in this one."""
        return Location(f"{self.url}/{name}", self.system, f"{self.path}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        with self._translated("write", name):
            self.system.pipe_file(f"{self.path}/{name}", content)

    def put(self, name: str, source: Path) -> None:
        """Write a file of this machine as an object."""
        with self._translated("write", name):
            self.system.put_file(str(source), f"{self.path}/{name}")

    def read(self, name: str) -> bytes:
        """Return the content of a small object. StorageError if it has more than `_MOST_SMALL` bytes."""
        with self._translated("read", name):
            content = bytes(self.system.cat_file(f"{self.path}/{name}", start=0, end=_MOST_SMALL + 1))
        if len(content) > _MOST_SMALL:
            raise StorageError(f"{self.url}/{name} has more than {_MOST_SMALL >> 20} MiB, and is not ours")
        return content

    def blocks(self, name: str, nbytes: int) -> Iterator[bytes]:
        """Yield the first `nbytes` of an object, in blocks, of which a few are read ahead.

        Raises StorageError if the object is shorter.
        """
        path = f"{self.path}/{name}"

        def read(start: int) -> bytes:
            end = min(start + _BLOCK, nbytes)
            block = bytes(self.system.cat_file(path, start=start, end=end))
            if len(block) != end - start:
                raise StorageError(f"{self.url}/{name} has less than {nbytes} bytes")
            return block

        starts = iter(range(0, nbytes, _BLOCK))
        ahead: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="object-storage") as requests:
            try:
                for start in starts:
                    ahead.append(requests.submit(read, start))
                    if len(ahead) > _REQUESTS:
                        yield self._result(ahead.popleft(), name)
                while ahead:
                    yield self._result(ahead.popleft(), name)
            finally:
                for future in ahead:
                    future.cancel()

    def names(self) -> list[str]:
        """Return the names of what is in the folder; none if there is no such folder."""
        with self._translated("list", ""):
            self.system.invalidate_cache()
            try:
                found = self.system.ls(self.path, detail=False)
            except FileNotFoundError:
                return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with all that is in it; no effect if it does not exist."""
        with self._translated("remove", name), suppress(FileNotFoundError):
            self.system.invalidate_cache()
            self.system.rm(f"{self.path}/{name}", recursive=True)

    def _result(self, future: Future[bytes], name: str) -> bytes:
        with self._translated("read", name):
            return future.result()

    @contextmanager
    def _translated(self, what: str, name: str) -> Iterator[None]:
        """Raise what a library of a storage raises, which may be anything, as a StorageError."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(_text(f"cannot {what} {self.url}/{name}", error)) from error


def _text(what: str, error: Exception) -> str:
    said = str(error)
    return f"{what}: {type(error).__name__}" + (f": {said}" if said else "")
