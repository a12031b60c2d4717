"""Child processes with one log file each; none of them outlives the supervisor, however it ends.

A child gets SIGTERM first, and SIGKILL after a time limit; it leads a process group, so that the processes
that it started end with it. A child that keeps all its state in the store is restarted after it was killed,
each time after a longer pause. The run ends if any other child dies, or if one child dies too often.
"""

from __future__ import annotations

import json
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
from areal_agents.launch.signals import deferred, uninterrupted
from areal_agents.launch.supervision import GRACE_S, SUPERVISED
from areal_agents.process_control import KILL_S, RUN_MARK, end_leftovers, signal_group, warn_unkillable

TAIL_LINES = 15
SERVERS = ("engine", "proxy")
SERVER_STOP_TIMEOUT_S = 15.0
MOST_RESTARTS = 5  # the most restarts of one child within RESTARTS_WITHIN_S
RESTARTS_WITHIN_S = 600.0
FIRST_PAUSE_S = 0.5  # pause before the first restart; each further restart doubles it
EXIT_REFUSED = 4  # of a process whose inputs or machine cannot be used, so that a restart would not help
SOON_S, POLL_S = 5.0, 0.05
STABLE_AFTER_S = 60.0  # a failure after this run time is not caused by the configuration
_ENDED_ON_REQUEST = (-signal.SIGTERM, -signal.SIGINT)  # exit codes of a child that a signal told to end


class ChildDied(ArealAgentsError):
    """A process that the run needs has ended; the message contains the end of its log."""


@dataclass(slots=True)
class Child:
    """A child process; after a restart, the one that was started last.

    Attributes:
        restart: starts the process again; None if its death ends the run.
        restarted: the times of the latest restarts.
        due: the time of the next restart; None if none is due.
        stop_timeout_s: longest time from SIGTERM until it is killed.
        log_start: the size of the log before this run, in bytes; earlier runs in the folder wrote it.
        is_elsewhere: whether the process is the command of a launcher, whose machine may be lost.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    restart: Callable[[], subprocess.Popen[bytes]] | None
    started: float = field(default_factory=time.monotonic)
    restarted: deque[float] = field(default_factory=deque)
    due: float | None = None
    stop_timeout_s: float = 60.0
    log_start: int = 0
    is_elsewhere: bool = False

    def tail(self) -> str:
        """Return the last lines that the process wrote to its log in this run."""
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Children:
    """The processes of one run, by name.

    Args:
        stop_timeout_s: longest time from SIGTERM until a process is killed, unless it has its own.
        say: called with a message about every restart.
        events: a file to which each start, death and restart is appended as a JSON line; None: none.
    """

    module = "areal_agents.launch.processes"

    def __init__(
        self,
        *,
        stop_timeout_s: float = 60.0,
        say: Callable[[str], object] = lambda text: None,
        events: Path | None = None,
    ) -> None:
        self._children: dict[str, Child] = {}
        self._stop_timeout_s = stop_timeout_s
        self._say = say
        self._events = events

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
        module: str = "",
        program: Sequence[str] = (),
        restarts: bool = False,
        stop_timeout_s: float | None = None,
    ) -> Child:
        """Start `python -m MODULE ARGUMENTS` with its output in `log`; the default module is `self.module`.

        With `restarts`, the process is restarted when it was killed, or failed after running for
        `STABLE_AFTER_S`. It may take `stop_timeout_s` to end; the default is that of all children.

        Args:
            program: a command in place of `python -m MODULE`, which runs the process on another machine and
                ends with its exit code. Such a process is restarted after every failure but a refusal.
        """
        command = [*(program or (sys.executable, "-m", module or self.module)), *arguments]
        mark = str(log)
        of_the_run = {RUN_MARK: mark, SUPERVISED: f"{stop_timeout_s or GRACE_S:g}"}

        def launch() -> subprocess.Popen[bytes]:
            if restarts:  # a trainer that is ending may still write its checkpoint
                end_leftovers(RUN_MARK, mark)
            with open(log, "ab") as file:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,  # closes when this process ends in any way
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, **of_the_run},
                    start_new_session=True,
                )

        log_start = log.stat().st_size if log.exists() else 0
        with deferred():
            child = Child(name, launch(), log, launch if restarts else None, log_start=log_start)
            child.is_elsewhere = bool(program)
            child.stop_timeout_s = stop_timeout_s or (
                SERVER_STOP_TIMEOUT_S if _is_server(child) else self._stop_timeout_s
            )
            self._children[name] = child
        self._record(name, "started")
        return child

    def check(self, *, may_finish: Sequence[str] = ()) -> None:
        """Restart processes that are due. Raises ChildDied if one ended that cannot be restarted (again)."""
        for child in self._children.values():
            code = child.process.poll()
            if code is None or (code == 0 and child.name in may_finish):
                continue
            if child.due is not None:
                if time.monotonic() >= child.due:
                    _restart(child)
                    self._record(child.name, "restarted")
                continue
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._record(child.name, "died", how)
            if not _may_restart(child, code):
                raise ChildDied(f"the {child.name} process {how}. The end of {child.log}:\n{child.tail()}")
            child.due = time.monotonic() + FIRST_PAUSE_S * 2 ** len(child.restarted)
            self._say(
                f"the {child.name} process {how} and will be restarted "
                f"(restart {len(child.restarted) + 1} of at most {MOST_RESTARTS} in "
                f"{RESTARTS_WITHIN_S / 60:.0f} minutes)"
            )

    def finished(self, name: str) -> bool:
        """Whether the process has ended and will not be restarted."""
        child = self._children[name]
        code = child.process.poll()
        return code is not None and child.due is None and not _may_restart(child, code)

    def pids(self) -> dict[str, int]:
        """Return the process id of each child by its name."""
        return {name: child.process.pid for name, child in self._children.items()}

    def stop(self) -> None:
        """End every process, and return when all have exited.

        The processes that call the engine and the proxy end first, so that a trainer can still publish and
        write its checkpoint, and the rollout process can seal its episodes.
        """
        servers = [child for child in self._children.values() if _is_server(child)]
        callers = [child for child in self._children.values() if not _is_server(child)]
        for children in (callers, servers):
            for child in children:
                signal_group(child.process.pid, signal.SIGTERM)
            began = time.monotonic()
            self._report_slow(children)
            for child in sorted(children, key=lambda child: child.stop_timeout_s):
                _wait_or_kill(child, began + child.stop_timeout_s)

    def _record(self, process: str, event: str, detail: str = "") -> None:
        if self._events is None:
            return
        line = json.dumps({"time": time.time(), "process": process, "event": event, "detail": detail})
        try:
            with open(self._events, "a") as file:
                file.write(line + "\n")
        except OSError as error:  # such as a full disk, which must not end the run
            self._say(f"{process} {event}; this cannot be written to {self._events}: {error.strerror}")

    def _report_slow(self, children: Sequence[Child]) -> None:
        """Say for how long the run waits, if a process does not end soon."""
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            if all(child.process.poll() is not None for child in children):
                return
            time.sleep(POLL_S)
        for child in children:
            if child.process.poll() is None:
                self._say(f"waiting for {child.name} to end, for at most {child.stop_timeout_s:.0f} s")


def _is_server(child: Child) -> bool:
    return child.name.partition("-")[0] in SERVERS  # engine-0, engine-1, …


def _may_restart(child: Child, code: int) -> bool:
    now = time.monotonic()
    while child.restarted and now - child.restarted[0] > RESTARTS_WITHIN_S:
        child.restarted.popleft()
    killed = code < 0 and code not in _ENDED_ON_REQUEST
    failed_late = code == 1 and now - child.started > STABLE_AFTER_S
    lost = child.is_elsewhere and code not in (0, EXIT_REFUSED)
    return (
        child.restart is not None and (killed or failed_late or lost) and len(child.restarted) < MOST_RESTARTS
    )


def _restart(child: Child) -> None:
    assert child.restart is not None
    signal_group(child.process.pid, signal.SIGKILL)  # the processes that it left in its group
    if child.process.stdin is not None:
        child.process.stdin.close()
    with deferred():
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
    signal_group(child.process.pid, signal.SIGKILL)  # the processes that it left in its group
    end_leftovers(RUN_MARK, str(child.log))  # and those that it left in other sessions
    if child.process.stdin is not None:
        child.process.stdin.close()
