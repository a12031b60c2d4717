"""Processes that a dead process of a run had started and could not end any more.

Each process of a run gets a mark in its environment, which whatever it starts inherits; so they are found
even in sessions of their own. Where there is no /proc, none is found.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

MARK = "AREAL_AGENTS_PROCESS"
_PROC = Path("/proc")


def end_leftovers(mark: str) -> int:
    """Kill every process that has the mark, but this one; how many there were."""
    wanted = f"{MARK}={mark}".encode()
    ended = 0
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                ended += 1
        except OSError:  # somebody else's, or gone
            continue
    return ended
