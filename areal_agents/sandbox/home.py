"""The folder of the sandboxes of one owner, and the removal of what killed owners left.

The folder holds a lock file that the owner and its keepers have locked. A folder whose lock is free or
missing is one whose owner and keepers are all dead, for example by kill -9 at once; the next start removes it
and its cgroups. Folders are made and removed only under the lock of the folder above them, so that none is
taken for a dead one while it is being made.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from areal_agents.errors import SandboxError
from areal_agents.folders import remove_folder
from areal_agents.sandbox.cgroups import CgroupHome

PREFIX = "areal-agents-sandbox-"  # of the names of cgroups
_LOCK, _PARENTS = "lock", "cgroups.json"
_BASE_S = 60.0  # longest wait in seconds for other processes that make or remove folders
_KILL_S = 5.0  # longest wait in seconds for killed processes to leave a cgroup


class SandboxHome:
    """A folder of this user for files of sandboxes, locked until it is closed and every keeper is dead."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self.lock = lock  # file descriptor
        self._started = 0
        self._parents: set[str] = set()

    @classmethod
    def open(cls, base: Path | None = None) -> SandboxHome:
        """Remove what dead owners left, and make a folder.

        Raises:
            SandboxError: the folder of all sandboxes belongs to somebody else.
        """
        base = base or Path(tempfile.gettempdir()) / f"areal-agents-sandboxes-{os.getuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        if status.st_uid != os.getuid() or base.is_symlink() or status.st_mode & 0o022:
            raise SandboxError(f"{base} is not a folder that only this user can write; remove it")
        with _alone_in(base):
            remove_leftovers(base)
            folder = base / secrets.token_hex(6)
            folder.mkdir(mode=0o700)
            lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(folder, lock)

    def new_name(self, cgroups: CgroupHome | None) -> str:
        """Return an unused name for the folder and the cgroups of a sandbox; record where cgroups are."""
        if cgroups is not None and not self._parents >= (found := {str(p) for p in cgroups.parents.values()}):
            self._parents |= found
            (self.folder / _PARENTS).write_text(json.dumps(sorted(self._parents)))
        self._started += 1
        return f"{PREFIX}{self.folder.name}-{self._started}"

    def close(self) -> None:
        """Remove the folder; its sandboxes have ended."""
        try:
            with _alone_in(self.folder.parent):
                remove_folder(self.folder)
        finally:
            os.close(self.lock)


@contextmanager
def _alone_in(base: Path) -> Iterator[None]:
    """Hold the lock of the folder of all sandboxes. Raises SandboxError if others hold it for too long."""
    deadline = time.monotonic() + _BASE_S
    held = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SandboxError(f"{base} is in use by another process for {_BASE_S:g} s") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(held)


def remove_leftovers(base: Path) -> int:
    """Remove the folders and cgroups of dead owners; return how many owners that were."""
    removed = 0
    for folder in base.iterdir():
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            parents = folder / _PARENTS
            if parents.exists():
                _remove_cgroups(json.loads(parents.read_text()), f"{PREFIX}{folder.name}-")
            remove_folder(folder)
            removed += 1
        finally:
            os.close(lock)
    return removed


def _remove_cgroups(parents: Iterable[str], prefix: str) -> None:
    for cgroup in (one for parent in parents for one in Path(parent).glob(f"{prefix}*")):
        deadline = time.monotonic() + _KILL_S
        while True:
            for pid in (cgroup / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                cgroup.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                break
