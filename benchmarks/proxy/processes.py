"""Servers under measurement: each runs in its own process, whose CPU time and peak memory are read from
outside."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from areal_agents.direct_http import direct_client
from areal_agents.errors import EngineUnavailable
from areal_agents.process_control import end_process

_URL = re.compile(r"https?://[^\s/]+")
_STOP_S = 20.0
_POLL_S = 0.1


class Server:
    """A server process, as a context manager that is entered once the server answers.

    Args:
        command: the command to start. The first line of its standard output that contains a URL gives the
            server's address.
        url: the server's address, for a server that does not print it.
        ready: path that answers 200 once the server is ready; None if the printed line shows that it is.
        env: environment variables added to those of this process.
        start_s: longest wait until it answers.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str = "",
        ready: str | None = None,
        env: Mapping[str, str] | None = None,
        start_s: float = 120.0,
    ) -> None:
        self._command = list(command)
        self._ready = ready
        self._env = env or {}
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.url = url

    def __enter__(self) -> Server:
        deadline = time.monotonic() + self._start_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if not self.url else self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self._env},
        )
        try:
            if not self.url:
                self.url = self._announced(deadline)
            if self._ready is not None:
                self._wait_ready(deadline)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._log is not None
        end_process(self._process, grace_s=_STOP_S)
        self._log.close()

    @property
    def pid(self) -> int:
        """Return the process id."""
        assert self._process is not None
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system time in seconds so far, of the process and its children."""
        # utime and stime are the 12th and 13th fields after the name, which ends with the last parenthesis.
        stats = [_proc(pid, "stat").rpartition(")")[2].split() for pid in self._tree()]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> tuple[float, float]:
        """Return (current, peak) resident memory in MB (10⁶ bytes), summed over the process and its
        children."""
        status = [_proc(pid, "status") for pid in self._tree()]
        now, peak = (
            sum(int(text.partition(name)[2].split()[0]) for text in status) for name in ("VmRSS:", "VmHWM:")
        )
        return now * 1024 / 1e6, peak * 1024 / 1e6

    def _tree(self) -> list[int]:
        """The process and all of its descendants."""
        found = [self.pid]
        for pid in found:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
        return found

    def _announced(self, deadline: float) -> str:
        """The URL in the server's first lines."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            text = ""
            while time.monotonic() < deadline:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    break
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    break
                text += piece.decode(errors="replace")
                if (found := _URL.search(text)) and "\n" in text[found.end() :]:
                    return found[0]
        raise EngineUnavailable(f"{' '.join(self._command[:4])} did not print its address: {self._tail()}")

    def _wait_ready(self, deadline: float) -> None:
        assert self._process is not None
        with direct_client(timeout_s=5) as client:
            while not self._answers(client):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise EngineUnavailable(f"{' '.join(self._command[:4])} does not answer: {self._tail()}")
                time.sleep(_POLL_S)

    def _answers(self, client: httpx.Client) -> bool:
        try:
            return client.get(self.url + (self._ready or "")).status_code == 200
        except httpx.TransportError:
            return False

    def _tail(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace")


def _proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()
