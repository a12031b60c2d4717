"""Helpers for the tests of whole runs: wait for a step of a run, and kill a process of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from areal_agents.store import Store
from areal_agents.store.roles import Role


def wait_for_step(
    step: int, run: Path, supervisor: subprocess.Popen[bytes], log: Path, *, within_s: float
) -> None:
    """Wait until a run has trained a step.

    Args:
        run: the folder of the run.
        log: the output of its supervisor, which a failure shows.
    """
    deadline = time.monotonic() + within_s
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert supervisor.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def kill_role(store: str | Path, role: Role, index: int) -> None:
    """Kill a process of the run and all its descendants, as the loss of its machine would."""
    with Store.open(store) as opened:
        pid = next(row.pid for row in opened.role_rows(role) if row.index == index)
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        os.kill(one.pid, signal.SIGKILL)
