"""Serves a scripted engine on a socket, in a thread of this process or in a process of its own.

Whatever is started here has ended when the with-block is left.
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
    """Serve `app` from a thread for the length of a with-block; yields its base URL."""
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
                raise EngineUnavailable(f"the scripted engine did not end within {_STOP_S:g} s")


@contextmanager
def running_process(model: str | Path, arguments: Sequence[str] = ()) -> Iterator[str]:
    """`python -m areal_agents.testing` for the length of a with-block; yields its base URL.

    `arguments` are further options of its command line. EngineUnavailable if it does not start.
    """
    command = [sys.executable, "-m", "areal_agents.testing", "--model", str(model), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = read_line(process.stdout.fileno(), timeout_s=_START_S)  # it announces itself, or ends
        if not line.startswith(ANNOUNCEMENT):
            raise EngineUnavailable(f"the scripted engine did not start, it said {line!r}")
        yield line.removeprefix(ANNOUNCEMENT).strip()
    finally:
        end_process(process, grace_s=_STOP_S)


def build_server(app: Any) -> uvicorn.Server:
    """The HTTP server of an engine; setting its `should_exit` ends it."""
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
    """A socket that listens. ConfigError if the port is taken or the host is not ours."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The base URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
