"""Child processes with a log file each. None of them outlives the supervisor, however it ends.

A child gets SIGTERM first and SIGKILL when its time is up; it leads a process group, so that what
it started itself ends with it. One that keeps nothing which is not in the store is started again when it
is killed, after a pause that grows; the others' death, or too many, end the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from areal_agents.errors import ArealAgentsError
from areal_agents.launch.signals import uninterrupted
from areal_agents.processes import KILL_S, RUN_MARK, end_leftovers, signal_group, warn_unkillable

TAIL_LINES = 15
SERVERS = ("engine", "proxy")
SERVER_STOP_TIMEOUT_S = 15.0
MOST_RESTARTS = 5  # of one child within RESTARTS_WITHIN_S
RESTARTS_WITHIN_S = 600.0
FIRST_PAUSE_S = 0.5  # before a restart; doubles with each of those
LONG_LIFE_S = 60.0  # what fails after it is no fault of the configuration
_ASKED = (-signal.SIGTERM, -signal.SIGINT)  # somebody wanted it to end


class ChildDied(ArealAgentsError):
    """A process of the run ended although it was needed; the message holds the end of its log."""


@dataclass(slots=True)
class Child:
    """A process, as it was started last.

    Attributes:
        restart: starts it again; None if its death ends the run.
        restarted: when it was started again lately.
        due: when that is to happen; None while it runs, or is not to.
        log_start: bytes that the log already had, from earlier runs in the same folder.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    restart: Callable[[], subprocess.Popen[bytes]] | None
    started: float = field(default_factory=time.monotonic)
    restarted: deque[float] = field(default_factory=deque)
    due: float | None = None
    log_start: int = 0

    def tail(self) -> str:
        """The last lines that it wrote to its log in this run."""
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Children:
    """The processes of one run, by name. `say` is told of those that are started again."""

    module = "areal_agents.launch.processes"

    def __init__(
        self, *, stop_timeout_s: float = 60.0, say: Callable[[str], object] = lambda text: None
    ) -> None:
        self._children: dict[str, Child] = {}
        self._stop_timeout_s = stop_timeout_s
        self._say = say

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self.stop()

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        ranks: int = 1,
        restarts: bool = False,
    ) -> Child:
        """Start `python -m areal_agents.launch.processes ARGUMENTS` with its output in `log`.

        With more than one rank, torchrun starts that many of it. With `restarts` it is started again when
        it was killed, or failed after it had run for long.
        """
        torchrun = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        )
        command = [*torchrun, "-m", self.module, *arguments]
        mark = str(log)

        def launch() -> subprocess.Popen[bytes]:
            if restarts:  # a trainer that is ending may still write its checkpoint
                end_leftovers(RUN_MARK, mark)
            with open(log, "ab") as file:
                return subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, RUN_MARK: mark},
                    start_new_session=True,
                )

        log_start = log.stat().st_size if log.exists() else 0
        self._children[name] = Child(name, launch(), log, launch if restarts else None, log_start=log_start)
        return self._children[name]

    def check(self, *, may_finish: Sequence[str] = ()) -> None:
        """Start again what may be. ChildDied if another process ended that should not have, or too often."""
        for child in self._children.values():
            code = child.process.poll()
            if code is None or (code == 0 and child.name in may_finish):
                continue
            if child.due is not None:
                if time.monotonic() >= child.due:
                    _start_again(child)
                continue
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            if not _may_restart(child, code):
                raise ChildDied(f"the {child.name} process {how}. The end of {child.log}:\n{child.tail()}")
            child.due = time.monotonic() + FIRST_PAUSE_S * 2 ** len(child.restarted)
            self._say(
                f"the {child.name} process {how}; it is started again ({len(child.restarted) + 1} of at most "
                f"{MOST_RESTARTS} times in {RESTARTS_WITHIN_S / 60:.0f} minutes)"
            )

    def finished(self, name: str) -> bool:
        """Whether the process has ended and is not started again."""
        child = self._children[name]
        code = child.process.poll()
        return code is not None and child.due is None and not _may_restart(child, code)

    def stop(self) -> None:
        """End every process; returns when all are gone.

        Those that call the engine and the proxy end first, so that a trainer can still publish and
        write its checkpoint, and the rollouts can seal their episodes.
        """
        servers = [child for child in self._children.values() if _is_server(child)]
        callers = [child for child in self._children.values() if not _is_server(child)]
        for children, timeout_s in ((callers, self._stop_timeout_s), (servers, SERVER_STOP_TIMEOUT_S)):
            for child in children:
                signal_group(child.process.pid, signal.SIGTERM)
            deadline = time.monotonic() + timeout_s
            for child in children:
                _wait_or_kill(child, deadline)


def _is_server(child: Child) -> bool:
    return child.name.partition("-")[0] in SERVERS  # engine-0, engine-1, …


def _may_restart(child: Child, code: int) -> bool:
    now = time.monotonic()
    while child.restarted and now - child.restarted[0] > RESTARTS_WITHIN_S:
        child.restarted.popleft()
    killed = code < 0 and code not in _ASKED
    failed_late = code == 1 and now - child.started > LONG_LIFE_S
    return child.restart is not None and (killed or failed_late) and len(child.restarted) < MOST_RESTARTS


def _start_again(child: Child) -> None:
    assert child.restart is not None
    signal_group(child.process.pid, signal.SIGKILL)  # what it left behind in its group
    if child.process.stdin is not None:
        child.process.stdin.close()
    child.process = child.restart()
    child.started, child.due = time.monotonic(), None
    child.restarted.append(child.started)


def _wait_or_kill(child: Child, deadline: float) -> None:
    try:
        child.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        signal_group(child.process.pid, signal.SIGKILL)
        try:
            child.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            warn_unkillable(child.process.pid)
    signal_group(child.process.pid, signal.SIGKILL)  # what it left behind in its group
    end_leftovers(RUN_MARK, str(child.log))  # and elsewhere
    if child.process.stdin is not None:
        child.process.stdin.close()
