"""Starts an engine as a child process, waits until it serves, and ends it with all of its own children.

The child holds the read end of a pipe whose write end only this process has, so it ends when this process
does, however that happens. An embedded engine inherits a socket that is already listening, so no port is
guessed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from areal_agents.direct_http import direct_client
from areal_agents.errors import ConfigError, EngineUnavailable
from areal_agents.inference.config import EmbeddedEngineConfig
from areal_agents.process_control import end_process, signal_group
from areal_agents.secret_variables import ENGINE_KEY
from areal_agents.sockets import address_of, listen
from areal_agents.tls import certificate_fault

POLL_S = 0.05
ANSWER_S = 5.0  # longest wait for one answer: SGLang's /health takes about a second
LOG_TAIL_BYTES = 2000
_STOP_TIMEOUT_S = 12.0  # SGLang checks for the signal every 5 s


class ServerProcess:
    """A server in a child process that leads a process group; a context manager. `url` is the address of the
    server. A subclass starts the process in `start`.

    Args:
        name: the name of the server in messages.
        log_path: the file for its output; if None, a temporary file that `stop` removes.
        start_timeout_s: longest wait for the port to answer, loading and compiling included.
        stop_timeout_s: how long SIGTERM may take before SIGKILL.
    """

    def __init__(
        self, name: str, *, log_path: Path | None, start_timeout_s: float, stop_timeout_s: float
    ) -> None:
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._temporary_log = log_path is None
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the child is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The return code of the child, as in subprocess; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the child; `url` is set, and answers once `wait_ready` returns."""
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Return once the server answers; raises EngineUnavailable with the end of its log if it does not."""
        deadline = time.monotonic() + self._start_timeout_s
        message = ""
        with direct_client(timeout_s=ANSWER_S) as client:
            while not message:
                timeout_s = min(ANSWER_S, max(POLL_S, deadline - time.monotonic()))
                try:
                    if _answers(client, f"{self.url}/health", timeout_s=timeout_s):
                        return
                except ConfigError as error:  # which no waiting changes
                    message = str(error)
                    break
                if not self.alive:
                    message = f"{self._name} ended with status {self.returncode} before it served"
                elif time.monotonic() > deadline:
                    message = f"{self._name} did not serve within {self._start_timeout_s:g} s"
                else:
                    time.sleep(POLL_S)
        tail = self.log_tail()
        self.stop()
        raise EngineUnavailable(f"{message}; its log ends:\n{tail}")

    def wait(self) -> int:
        """Wait until the child has ended and return its return code."""
        assert self._process is not None, "start() comes first"
        return self._process.wait()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after `stop_timeout_s`; return when the process group has ended."""
        if self._process is not None:
            end_process(self._process, grace_s=self._stop_timeout_s)
            signal_group(self._process.pid, signal.SIGKILL)  # children that it left behind
        if self._temporary_log and self._log_path is not None:
            self._log_path.unlink(missing_ok=True)

    def log_tail(self) -> str:
        """The end of the child's output."""
        if self._log_path is None or not self._log_path.exists():
            return ""
        return self._log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        if self._log_path is None:
            handle, name = tempfile.mkstemp(prefix="areal-agents-engine-", suffix=".log")
            os.close(handle)
            self._log_path = Path(name)
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=log,
                stderr=log,
                pass_fds=pass_fds,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C at the terminal must reach the supervisor only
            )


class CommandProcess(ServerProcess):
    """A real SGLang or vLLM server, which runs within a with-block.

    Args:
        command: see `server_command` of each; its port is `port`.
        environment: its whole environment.
        scheme: of its URL.

    The other arguments are those of ServerProcess.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        port: int,
        host: str = "127.0.0.1",
        log_path: Path | None = None,
        start_timeout_s: float = 600.0,
        scheme: str = "http",
    ) -> None:
        super().__init__(
            name, log_path=log_path, start_timeout_s=start_timeout_s, stop_timeout_s=_STOP_TIMEOUT_S
        )
        self._command, self._environment = list(command), dict(environment)
        self.url = f"{scheme}://{address_of(host, port)}"

    def start(self) -> None:
        """See ServerProcess.start."""
        self._spawn(self._command, self._environment)


class EngineProcess(ServerProcess):
    """An embedded engine in a child process.

    Args:
        config: the engine's options; port 0 takes a free port.
        key: the key that requests must have; "": none.
        env: variables to add to this process's environment for the child.

    The other arguments are those of ServerProcess.
    """

    def __init__(
        self,
        config: EmbeddedEngineConfig,
        *,
        log_path: Path | None = None,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 15.0,
        env: dict[str, str] | None = None,
        key: str = "",
    ) -> None:
        super().__init__(
            "the engine", log_path=log_path, start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s
        )
        self._config = config
        self._env = {**(env or {}), ENGINE_KEY: key}

    def start(self) -> None:
        """See ServerProcess.start. ConfigError if its port is taken."""
        listener = listen(self._config.host, self._config.port, setting="engine.port")
        host, port = listener.getsockname()[:2]
        self.url = f"http://{address_of(host, port)}"
        config = self._config.model_copy(
            update={"port": port, "listen_fd": listener.fileno(), "exit_with_parent": True}
        )
        with listener:
            self._spawn(
                [sys.executable, "-m", "areal_agents.inference.embedded", config.model_dump_json()],
                {**os.environ, **self._env},
                [listener.fileno()],
            )


@contextmanager
def running_engine(
    model: str | Path,
    *,
    log_path: Path | None = None,
    start_timeout_s: float = 300.0,
    key: str = "",
    **options: Any,
) -> Iterator[str]:
    """Run an embedded engine within a with-block; yields its URL.

    `options` are fields of EmbeddedEngineConfig; the default port is a free one. `key` is the key that
    requests must have.
    """
    config = EmbeddedEngineConfig(model=str(model), **{"port": 0, "incremental_streaming": True, **options})
    with EngineProcess(config, log_path=log_path, start_timeout_s=start_timeout_s, key=key) as engine:
        yield engine.url


def _answers(client: httpx.Client, url: str, *, timeout_s: float) -> bool:
    """Whether `url` answers 200 in time; the socket listens from the start, so a call may wait for the
    child. Raises ConfigError for a certificate that is not valid.
    """
    try:
        return client.get(url, timeout=timeout_s).status_code == 200
    except httpx.TransportError as error:
        if fault := certificate_fault(url, error):
            raise ConfigError(fault) from None
        return False
