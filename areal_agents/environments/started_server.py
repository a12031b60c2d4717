"""A server that a line names as a command: started for the first episode, ended with the environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import tempfile
from collections.abc import Mapping
from typing import BinaryIO

import httpx

from areal_agents.direct_http import direct_async_client
from areal_agents.errors import TaskEnvironmentError
from areal_agents.process_control import KILL_S, signal_group, warn_unkillable
from areal_agents.secret_variables import without_secrets
from areal_agents.sockets import listen

START_TIMEOUT_S = 300.0  # some servers import for minutes
GRACE_S = 1.0  # between SIGTERM and SIGKILL
_LAST_WORDS = 2000  # bytes of a server's output that an error shows


class StartedServer:
    """The process of a server and its address; it leads a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, output: BinaryIO, name: str) -> None:
        self._process, self._output, self._name = process, output, name
        self.url = url

    @classmethod
    async def start(cls, command: str, *, ready_path: str) -> StartedServer:
        """Start a server and wait until it answers.

        Args:
            command: the command; `{port}` in it stands for a free port, which the variable PORT has, too.
            ready_path: a GET of this path has status 200 when the server is ready.

        Raises:
            TaskEnvironmentError: it cannot be started, ends, or does not answer in time.
        """
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        try:
            words = shlex.split(command.replace("{port}", str(port)))
        except ValueError as error:
            raise TaskEnvironmentError(f"the command {command!r} cannot be read: {error}") from error
        output = tempfile.TemporaryFile()  # noqa: SIM115  # closed at the end of the process
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=_with_port(os.environ, port),
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            raise TaskEnvironmentError(f"cannot start {words[0]}: {error.strerror}") from error
        server = cls(process, f"http://127.0.0.1:{port}", output, words[0])
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await server._answers(ready_path)
        except TimeoutError as error:
            said = server.last_words()
            await server.end()
            raise TaskEnvironmentError(
                f"{command!r} does not answer at {server.url}{ready_path} within {START_TIMEOUT_S:.0f} s "
                f"(does it listen on {{port}} or PORT?): {said}"
            ) from error
        except BaseException:
            await asyncio.shield(server.end())
            raise
        return server

    @property
    def has_ended(self) -> bool:
        """Whether the process has exited."""
        return self._process.returncode is not None

    def last_words(self) -> str:
        """Return the end of what it has written."""
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - _LAST_WORDS))
        return self._output.read().decode(errors="replace").strip()

    async def end(self) -> None:
        """End the process and its group."""
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILL_S)):
            signal_group(self._process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), wait_s)
                break
        else:
            warn_unkillable(self._process.pid)
        signal_group(self._process.pid, signal.SIGKILL)  # whatever it has left
        self._output.close()

    async def _answers(self, path: str) -> None:
        """Wait until the server answers. Raises TaskEnvironmentError if it ends before."""
        async with direct_async_client(timeout_s=5.0, base_url=self.url) as http:
            while not self.has_ended:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(path)).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        raise TaskEnvironmentError(
            f"the server {self._name} ended with status {self._process.returncode}: {self.last_words()}"
        )


def _with_port(environment: Mapping[str, str], port: int) -> dict[str, str]:
    return {**without_secrets(environment), "PORT": str(port)}
