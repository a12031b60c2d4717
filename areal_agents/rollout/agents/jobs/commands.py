"""Runs the commands of a scheduler, and ends those that hang.

A command takes at most COMMAND_S. Another thread can end it earlier, so that a scheduler that does not answer
does not hold the exit of this process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from areal_agents.errors import AgentError

COMMAND_S = 60.0  # longest wait for a command of the scheduler
_LOOK_S = 0.2  # between checks whether a running command was given up


class SchedulerError(AgentError):
    """A command of the scheduler failed; the message is its own."""


class QueueFull(SchedulerError):
    """The scheduler takes no further job of this user for now, or cannot be reached."""


class Unanswered(SchedulerError):
    """The scheduler did not answer to a submission, so it may have taken the job or not."""


class SchedulerCommands:
    """Runs the commands that one owner of jobs gives to a scheduler, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def run(
        self, command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> str:
        """Run a command, and return what it writes.

        Args:
            environment: its variables; None: those of this process.

        Raises:
            SchedulerError: it failed, did not end in time, or was ended by `interrupt` or `close`.
        """
        if self._is_closed:
            raise SchedulerError(f"{command[0]} is not run any more")
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(os.environ if environment is None else environment),
            )
        except OSError as error:
            raise SchedulerError(f"{command[0]} cannot be run: {error.strerror}") from None
        with self._lock:
            if not self._is_closed:
                self._awaited.add(process)
        try:
            written, said = self._output(process, command[0], stdin.encode())
        finally:
            with self._lock:
                self._awaited.discard(process)
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a file system
                process.wait(_LOOK_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if process.returncode:
            reason = said.decode(errors="replace").strip() or f"exit code {process.returncode}"
            raise SchedulerError(f"{command[0]} failed: {reason}")
        return written.decode(errors="replace")

    def interrupt(self) -> None:
        """End the commands that run now."""
        with self._lock:
            self._awaited.clear()

    def close(self) -> None:
        """End the commands that run now, and every later one at once."""
        with self._lock:
            self._is_closed = True
            self._awaited.clear()

    def _output(self, process: subprocess.Popen[bytes], program: str, stdin: bytes) -> tuple[bytes, bytes]:
        """Return what a command has written to its output and its error output, when it has ended.

        This does not wait for the end of a command that is given up: a process that the command has started,
        such as a helper that logs in, may hold its pipes open and hang too.
        """
        deadline = time.monotonic() + COMMAND_S
        given: bytes | None = stdin
        while True:
            try:
                return process.communicate(given, timeout=_LOOK_S)
            except subprocess.TimeoutExpired as expired:
                given = None  # it is being written already
                said = (expired.stderr or b"").decode(errors="replace").strip()
            if process not in self._awaited:
                raise SchedulerError(f"{program} was ended before it had answered")
            if time.monotonic() > deadline:
                raise SchedulerError(
                    f"{program} did not end within {COMMAND_S:g} s" + (f": {said}" if said else "")
                )
