"""Ends processes: a process itself, its process group, and the processes that it left in other sessions.

A process counts as ended when it has exited, even if other processes hold its pipes, and every wait has a
limit. Each process gets a mark in its environment, which its children inherit. Children that outlive it are
therefore found even in other sessions, unless they were started with a new environment. Without /proc, none
is found.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

RUN_MARK = "AREAL_AGENTS_PROCESS"  # marks a process of a run; the value is its log file
AGENT_MARK = "AREAL_AGENTS_AGENT_PROCESS"  # marks an agent's process, which a process of a run started
INNER_AGENT_MARK = "AREAL_AGENTS_INNER_AGENT_PROCESS"  # marks a process that an agent's process started so
KILL_S = 10.0  # longest wait in seconds for a process to exit after SIGKILL
_DELIVERED_S = 5.0  # longest wait for a signal that a process sent to itself
_COLLECTED_OBJECTS = 20_000  # objects allocated between collections; the interpreter's own setting is 700
_LEFTOVERS_S = 5.0  # longest search in seconds for processes that start during the search
_PROC = Path("/proc")
_SET_DUMPABLE = 4  # PR_SET_DUMPABLE
_STAT_ENV_END = 51 - 3  # index among the fields of /proc/PID/stat after the command, see proc(5)

logger = logging.getLogger(__name__)


def collect_seldom() -> None:
    """Let the garbage collector of this process run seldom, and not at all when the process exits.

    An import of torch and transformers leaves several hundred thousand objects, through which the interpreter
    would search again and again during the import and when the process exits. What only a cycle of references
    keeps alive at the end is not finalised; Python does not promise that anyway. With Triton loaded the
    collections at the end do run: its extension reports the objects that are left as leaks, in lines that
    would follow the error for which a process has ended.
    """
    gc.set_threshold(_COLLECTED_OBJECTS)
    atexit.register(_skip_last_collections)


def _skip_last_collections() -> None:
    if "triton" not in sys.modules:
        gc.freeze()


def end_leftovers(variable: str, mark: str) -> int:
    """Kill every process whose environment has `variable` = `mark`, except this one.

    Processes that these start during the search are found too. The search ends when a scan of all processes
    finds no further one and none whose environment is not readable yet, or after five seconds.

    Returns:
        The number of processes that were killed.
    """
    wanted = f"{variable}={mark}".encode()
    ended: set[int] = set()
    deadline = time.monotonic() + _LEFTOVERS_S
    while True:
        found, starting = _marked(wanted)
        new = found - ended
        for pid in new:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # it has exited, or is another user's
                os.kill(pid, signal.SIGKILL)
        ended |= new
        if not (new or starting) or time.monotonic() > deadline:
            return len(ended)


def forbid_inspection() -> None:
    """Keep other processes of the same user from reading the memory and the variables of this one.

    Root can read them still. Linux only; elsewhere it does nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def end_as(code: int) -> NoReturn:
    """End this process with an exit code; by a signal, without a core dump, if the code is negative."""
    sys.stdout.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(_DELIVERED_S)
        os._exit(128 - code)  # as a shell says it, if the signal has no effect
    os._exit(code)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads, if it has a member."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def end_process(process: subprocess.Popen[bytes] | subprocess.Popen[str], *, grace_s: float) -> int | None:
    """Send SIGTERM to a process, then SIGKILL after `grace_s` seconds, and close the pipes to it.

    Only the process itself is signalled; `signal_group` signals a process group.

    Returns:
        Its exit code; None, with a warning in the log, if it has not exited `KILL_S` seconds after SIGKILL,
        for example because the kernel holds it in uninterruptible sleep.
    """
    process.terminate()
    try:
        return process.wait(max(0.0, grace_s))
    except subprocess.TimeoutExpired:
        return kill_process(process)
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # unread input
                    pipe.close()


def mark_of(pid: int, variable: str) -> str | None:
    """Return the mark that a process got in its environment; None if it has none, or has ended."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    name = f"{variable}=".encode()
    found = [entry for entry in environment.split(b"\0") if entry.startswith(name)]
    return found[0][len(name) :].decode(errors="replace") if found else None


def kill_process(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> int | None:
    """Send SIGKILL to a process, and return what `end_process` returns."""
    process.kill()
    try:
        return process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        warn_unkillable(process.pid)
        return None


def warn_unkillable(pid: int) -> None:
    """Log that a process has not exited within the time limit after SIGKILL."""
    logger.warning("process %d has not exited within %g s of SIGKILL; it is left running", pid, KILL_S)


def read_line(fd: int, *, timeout_s: float) -> str:
    """Return the first line from a pipe, or the part that arrived before the pipe closed or the timeout."""
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


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(0), so that context managers are closed before the process exits."""
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _marked(wanted: bytes) -> tuple[set[int], bool]:
    """Return the ids of the processes with `wanted` in their environment, and whether one has none yet."""
    found, starting = set(), False
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # another user's process, or one that has exited
            environment = (entry / "environ").read_bytes()
            if wanted in environment.split(b"\0"):
                found.add(int(entry.name))
            starting = starting or (not environment and _is_starting(entry))
    return found, starting


def _is_starting(process: Path) -> bool:
    """Whether a process without an environment is in the middle of `execve`, which has not written it yet.

    Zombies and kernel threads have no program, and a process that was started with an empty environment has
    an address for it. Raises OSError if the process has exited.
    """
    fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    (process / "exe").readlink()
    return fields[_STAT_ENV_END] == b"0"


def _exit(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)
