"""Serves a scripted engine on a socket, in a thread of this process or in a process of its own.

Both are stopped when their with-block is left.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from areal_agents.errors import ConfigError, EngineUnavailable
from areal_agents.processes import end_process, read_line
from areal_agents.testing.app import ScriptedApp

ANNOUNCEMENT = "scripted engine at "
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_SHUTDOWN_S = 1
_START_S = 120.0
_STOP_S = 15.0


@contextmanager
def running(app: ScriptedApp, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve `app` in a thread within the with-block, and yield its base URL."""
    with listen(host, port) as listener:
        server = build_server(app)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="scripted-engine", daemon=True
        )
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(_STOP_S)
            if thread.is_alive():
                raise EngineUnavailable(f"the scripted engine did not stop within {_STOP_S:g} s")


@contextmanager
def running_process(model: str | Path, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Run `python -m areal_agents.testing` within the with-block, and yield its base URL.

    `arguments` are further command-line options. Raise EngineUnavailable if the engine does not start.
    """
    command = [sys.executable, "-m", "areal_agents.testing", "--model", str(model), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = read_line(process.stdout.fileno(), timeout_s=_START_S)  # its URL, or "" if it exits
        if not line.startswith(ANNOUNCEMENT):
            raise EngineUnavailable(
                f"the scripted engine did not start; its first line of output is {line!r}, and its errors "
                "are on standard error"
            )
        yield line.removeprefix(ANNOUNCEMENT).strip()
    finally:
        end_process(process, grace_s=_STOP_S)


def build_server(app: Any) -> uvicorn.Server:
    """Return the HTTP server of an engine; set its `should_exit` to stop it."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            lifespan="off",
            access_log=False,
            log_level="error",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            backlog=_BACKLOG,
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise ConfigError if the port is taken or the host is not local."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the base URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
