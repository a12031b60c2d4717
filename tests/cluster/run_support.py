"""Helpers for the tests of whole runs on this machine: wait for a step, lose a process, end the run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from areal_agents.store import Store
from areal_agents.store.roles import Role, RoleRow

REPOSITORY = Path(__file__).parents[2]
MANY = 1000  # steps of a run that is stopped before its end
STOP_S = 300.0  # longest time in which a run ends when it is told to
_EXIT_INTERRUPTED = 130


class SupervisedRun:
    """A run and its supervisor.

    Attributes:
        folder: the folder of the run.
        log: the output of its supervisor, which a failure shows.
    """

    def __init__(self, supervisor: subprocess.Popen[bytes], folder: Path, log: Path, within_s: float) -> None:
        self.supervisor = supervisor
        self.folder = folder
        self.log = log
        self._deadline = time.monotonic() + within_s

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has trained a step."""
        self._until(lambda: self.steps() >= step)

    def steps(self) -> int:
        """Return the number of steps that the run has trained."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def lose(self, store_url: str | Path, role: Role, index: int) -> None:
        """Kill a process as the loss of its machine would, and wait until another one has its place."""
        with Store.open(store_url) as store:

            def row() -> RoleRow:
                return next(row for row in store.role_rows(role) if row.index == index)

            lost = row()
            kill_with_descendants(lost.pid)
            self._until(lambda: row().epoch > lost.epoch)

    def stop(self) -> int:
        """End the run before its last step, and return the number of steps that it has trained."""
        assert self.supervisor.poll() is None, self.log.read_text()
        self.supervisor.terminate()
        assert self.supervisor.wait(STOP_S) == _EXIT_INTERRUPTED, self.log.read_text()
        return self.steps()

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert self.supervisor.poll() is None, self.log.read_text()
            assert time.monotonic() < self._deadline, self.log.read_text()
            time.sleep(0.2)


@contextmanager
def supervised(
    command: Sequence[str],
    folder: Path,
    log: Path,
    *,
    within_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[SupervisedRun]:
    """Start a run with the command of its supervisor; it ends with the with-block.

    Args:
        folder: the folder of the run.
        log: a file for the output of the supervisor.
        within_s: the longest time from now until the run has done all that a test waits for.
        environment: variables of the supervisor, on top of those of this process.
    """
    with open(log, "wb") as output:
        supervisor = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield SupervisedRun(supervisor, folder, log, within_s)
    finally:
        supervisor.terminate()
        supervisor.wait(STOP_S)


def kill_with_descendants(pid: int) -> None:
    """Kill a process and all its descendants, some of which may end meanwhile."""
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            one.kill()
