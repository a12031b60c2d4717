"""Serves a scripted engine on a socket, in a thread of this process or in a process of its own.

Both are stopped when their with-block is left.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from areal_agents.errors import EngineUnavailable
from areal_agents.process_control import end_process, read_line
from areal_agents.sockets import BACKLOG, listen, url_of
from areal_agents.testing.app import ScriptedApp

ANNOUNCEMENT = "scripted engine at "
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
            backlog=BACKLOG,
        )
    )
