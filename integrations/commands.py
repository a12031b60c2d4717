"""Runs a command to its end within a time limit, and ends everything that it started."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from areal_agents.process_control import AGENT_MARK, end_leftovers, kill_process, signal_group


class CommandFailed(Exception):
    """A command exited with another status than 0, did not end in time, or could not be started. The message
    ends with the end of its standard error."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command wrote."""

    stdout: str
    stderr: str


_LONGEST = 1500  # characters of standard error in a message


def run_command(
    words: Sequence[str], environment: Mapping[str, str], *, cwd: Path, timeout_s: float
) -> Output:
    """Run a command without input. Raise CommandFailed unless it exits with status 0 in time.

    The processes that it leaves running, also in other sessions, are killed. Its output goes to files, since
    such a process would hold a pipe open.
    """
    mark = secrets.token_hex(8)
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                words,
                env={**environment, AGENT_MARK: mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandFailed(f"{words[0]} cannot be started: {error}") from error
        late = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            signal_group(process.pid, signal.SIGKILL)
            kill_process(process)
            end_leftovers(AGENT_MARK, mark)
        output = Output(_text(stdout), _text(stderr))
    if late:
        raise CommandFailed(f"it did not end within {timeout_s:g} s: {_end_of(output.stderr)}")
    if process.returncode:
        raise CommandFailed(f"exit status {process.returncode}: {_end_of(output.stderr or output.stdout)}")
    return output


def base_environment(home: Path) -> dict[str, str]:
    """Return this process's environment without what is about its own Python, with another home folder."""
    left_out = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "NODE_PATH"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "HOME": str(home)}


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _end_of(text: str) -> str:
    return text.strip()[-_LONGEST:]
