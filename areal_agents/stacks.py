"""Writes what a process of a run is doing when it is asked: the stacks of its threads and asyncio tasks.

A process that answers makes the file stacks/<name>-<pid>.txt beside its log when it starts, and removes it
when it ends, so the file says that SIGUSR2 may be sent to it. The stacks of threads are written even if the
interpreter is held in C code.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TextIO

from areal_agents.process_control import RUN_MARK, mark_of

WAIT_S = 3.0  # longest wait for the answers of all processes
QUIET_S = 0.3  # an answer is complete when nothing was added to it for so long
_POLL_S = 0.05


def answer_with_stacks(name: str) -> None:
    """Write the stacks of this process to its file at each SIGUSR2, until the process ends.

    A process that no supervisor of a run has started has no log, and does not answer. To be called on the
    main thread.
    """
    mark = os.environ.get(RUN_MARK)
    if mark is None:
        return
    folder = stacks_folder(Path(mark).parent)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{os.getpid()}.txt"
    file = path.open("w")

    def write_tasks(_number: int, _frame: FrameType | None) -> None:
        _write_tasks(file)

    signal.signal(signal.SIGUSR2, write_tasks)
    faulthandler.register(signal.SIGUSR2, file, all_threads=True, chain=True)
    atexit.register(_remove, path)


def stacks_folder(logs: Path) -> Path:
    """Return where the processes whose logs are in `logs` write their stacks."""
    return logs / "stacks"


def collect_stacks(logs: Path) -> dict[str, str]:
    """Ask every process of a run on this machine for its stacks; return them by "<name>-<pid>".

    Files of processes that are not found here stay: they were killed, or run on another machine.

    Args:
        logs: the folder of the logs of the run.
    """
    asked: dict[Path, int] = {}
    for path in sorted(stacks_folder(logs).glob("*-*.txt")):
        pid = path.stem.rpartition("-")[2]
        mark = mark_of(int(pid), RUN_MARK) if pid.isdecimal() else None
        if mark is None or Path(mark).parent.resolve() != logs.resolve():
            continue  # it was killed or is on another machine; another process may have its number
        asked[path] = path.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGUSR2)
    _wait(asked)
    return {path.stem: _added(path, size) for path, size in asked.items()}


def innermost(stacks: str) -> str:
    """Return where the main thread is in this project's code, or "" if that is not known.

    faulthandler writes the main thread last, the innermost frame first.
    """
    main = stacks.partition("\nTask ")[0].rpartition("hread 0x")[2]
    for line in main.splitlines():
        if 'File "' in line and "areal_agents" in line and "areal_agents/stacks.py" not in line:
            path, _, rest = line.partition('"')[2].partition('"')
            return f"areal_agents{path.rpartition('areal_agents')[2]}{rest}"
    return ""


def _wait(asked: Mapping[Path, int]) -> None:
    """Return when every file has grown and grows no more, or after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    sizes, changed = dict(asked), time.monotonic()
    while time.monotonic() < deadline:
        now = {path: path.stat().st_size if path.exists() else size for path, size in sizes.items()}
        if now != sizes:
            sizes, changed = now, time.monotonic()
        elif time.monotonic() - changed > QUIET_S and all(sizes[path] > asked[path] for path in asked):
            return
        time.sleep(_POLL_S)


def _added(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(size)
            return file.read().decode(errors="replace") or "the process did not answer"
    except FileNotFoundError:
        return "the process ended"


def _write_tasks(file: TextIO) -> None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    for task in asyncio.all_tasks(loop):
        print(f"\nTask {task.get_name()}:", file=file)
        task.print_stack(file=file)
    file.flush()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
