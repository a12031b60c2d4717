"""The resident memory of a run's processes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import psutil

READ_EVERY_S = 5.0


class MemoryUse:
    """Memory by role, read again every few seconds: each read looks at all processes of the machine.

    A role's memory is that of the processes that the supervisor started for it and of those that they
    started. Pages that processes share are counted in each of them.

    Args:
        pids: returns the process of each child of the supervisor, by its name.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._read_at = -READ_EVERY_S
        self.by_role: dict[str, int] = {}
        self.total = psutil.virtual_memory().total

    def update(self) -> None:
        """Read the memory, unless it was read a moment ago."""
        if time.monotonic() - self._read_at < READ_EVERY_S:
            return
        self._read_at = time.monotonic()
        found: dict[str, int] = {}
        for name, pid in self._pids().items():
            role = name.partition("-")[0]  # engine-0, engine-1, …
            found[role] = found.get(role, 0) + _with_children(pid)
        self.by_role = found


def _with_children(pid: int) -> int:
    """Return the resident bytes of a process and of those that it started; 0 if it has ended."""
    size = 0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            try:
                size += one.memory_info().rss
            except psutil.NoSuchProcess:  # it ended since the list was made
                continue
    except psutil.NoSuchProcess:
        return size
    return size
