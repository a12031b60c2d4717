"""How processes are ended: the process itself, its group, and what it left in sessions of its own.

A process has ended when it has exited, whoever else holds its pipes, and every wait has a limit. Each process
gets a mark in its environment, which whatever it starts inherits; so leftovers are found even in other
sessions, unless they were started with an environment of their own. Where there is no /proc, none is found.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path

RUN_MARK = "AREAL_AGENTS_PROCESS"  # of a process of a run; the value is its log file
AGENT_MARK = "AREAL_AGENTS_AGENT_PROCESS"  # of an agent's process, within one of a run
KILL_S = 10.0  # longest wait in seconds for a process to exit after SIGKILL
_MOST_ROUNDS = 5
_PROC = Path("/proc")

logger = logging.getLogger(__name__)


def end_leftovers(variable: str, mark: str) -> int:
    """Kill every process whose environment has `variable` = `mark`, except this one.

    Processes that they start meanwhile are found too.

    Returns:
        How many there were.
    """
    wanted = f"{variable}={mark}".encode()
    ended: set[int] = set()
    for _ in range(_MOST_ROUNDS):
        found = _marked(wanted) - ended
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or another user's
                os.kill(pid, signal.SIGKILL)
        if not found:
            break
        ended |= found
    return len(ended)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads, if any of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def end_process(process: subprocess.Popen[bytes] | subprocess.Popen[str], *, grace_s: float) -> int | None:
    """SIGTERM to a process, SIGKILL `grace_s` seconds later, and close the pipes to it.

    A process that leads a group is ended with the group: see `signal_group`.

    Returns:
        Its exit code; None, with a warning in the log, if it has not exited `KILL_S` after SIGKILL, as
        one that the kernel holds in uninterruptible sleep.
    """
    process.terminate()
    try:
        return process.wait(max(0.0, grace_s))
    except subprocess.TimeoutExpired:
        return kill_process(process)
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it did not read
                    pipe.close()


def kill_process(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> int | None:
    """SIGKILL to a process; returns as `end_process`."""
    process.kill()
    try:
        return process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        warn_unkillable(process.pid)
        return None


def warn_unkillable(pid: int) -> None:
    """Say that a process has not exited in time after SIGKILL."""
    logger.warning("process %d has not exited within %g s of SIGKILL; it is left behind", pid, KILL_S)


def read_line(fd: int, *, timeout_s: float) -> str:
    """The first line that a pipe gives; what has come of it if the pipe ends, or does not give it in time."""
    deadline = time.monotonic() + timeout_s
    read = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while b"\n" not in read and selector.select(max(0.0, deadline - time.monotonic())):
            piece = os.read(fd, 65536)
            if not piece:
                break
            read += piece
    return read.partition(b"\n")[0].decode(errors="replace")


def _marked(wanted: bytes) -> set[int]:
    found = set()
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # another user's, or gone
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found
