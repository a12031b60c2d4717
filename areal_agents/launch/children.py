"""Child processes with a log file each. Whatever ends the supervisor, none of them stays behind.

A child gets SIGTERM first and SIGKILL when its time is up; it leads a process group, so that what
it started itself ends with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from areal_agents.errors import ArealAgentsError
from areal_agents.launch.signals import uninterrupted

TAIL_LINES = 15
SERVERS = ("engine", "proxy")
SERVER_STOP_TIMEOUT_S = 15.0


class ChildDied(ArealAgentsError):
    """A process of the run ended although it was needed; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Child:
    """A started process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Children:
    """The processes of one run, by name."""

    def __init__(self, *, stop_timeout_s: float = 60.0) -> None:
        self._children: dict[str, Child] = {}
        self._stop_timeout_s = stop_timeout_s

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
    ) -> Child:
        """Start `python -m areal_agents.launch.processes ARGUMENTS` with its output in `log`.

        With more than one rank, torchrun starts that many of it.
        """
        torchrun = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        )
        with open(log, "ab") as file:
            process = subprocess.Popen(
                [sys.executable, *torchrun, "-m", "areal_agents.launch.processes", *arguments],
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._children[name] = Child(name, process, log)
        return self._children[name]

    def check(self, *, may_finish: Sequence[str] = ()) -> None:
        """Raise ChildDied if a process ended that should not have, or ended with an error."""
        for child in self._children.values():
            code = child.process.poll()
            if code is None or (code == 0 and child.name in may_finish):
                continue
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise ChildDied(f"the {child.name} process {how}. The end of {child.log}:\n{child.tail()}")

    def finished(self, name: str) -> bool:
        """Whether the process has ended."""
        return self._children[name].process.poll() is not None

    def stop(self) -> None:
        """End every process; returns when all are gone.

        Those that call the engine and the proxy end first, so that a trainer can still publish and
        write its checkpoint, and the rollouts can seal their episodes.
        """
        servers = [child for child in self._children.values() if child.name in SERVERS]
        callers = [child for child in self._children.values() if child.name not in SERVERS]
        for children, timeout_s in ((callers, self._stop_timeout_s), (servers, SERVER_STOP_TIMEOUT_S)):
            for child in children:
                _signal_group(child, signal.SIGTERM)
            deadline = time.monotonic() + timeout_s
            for child in children:
                _wait_or_kill(child, deadline)


def _wait_or_kill(child: Child, deadline: float) -> None:
    try:
        child.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _signal_group(child, signal.SIGKILL)
        child.process.wait()
    _signal_group(child, signal.SIGKILL)  # what it left behind in its group
    if child.process.stdin is not None:
        child.process.stdin.close()


def _signal_group(child: Child, number: int) -> None:
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return
