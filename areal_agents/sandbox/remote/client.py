"""Sandboxes on hosts, in the form in which a sandbox of this machine is used.

Everything that a command is given travels with it: the folder of the sandbox, unless the host has it already,
and the folders that only one command sees. `image` and `readable` name what the machine of the host has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, cast

from areal_agents.direct_http import websocket_errors
from areal_agents.errors import SandboxError, SandboxUnavailable
from areal_agents.process_control import KILL_S
from areal_agents.sandbox.files import read_file, write_file
from areal_agents.sandbox.relay import relayed_url
from areal_agents.sandbox.remote.archives import Digests, packed, replace_content
from areal_agents.sandbox.remote.hosts import PlaceOnHost, SandboxHosts
from areal_agents.sandbox.remote.messages import (
    DATA,
    LOG,
    PIECE,
    STREAM,
    at_server,
    receive_data,
    send,
    spec_as_json,
)
from areal_agents.sandbox.remote.pipes import open_reader, open_writer
from areal_agents.sandbox.sandbox import KEPT_OUTPUT, Finished, Mount, Output, SandboxSpec

_START_S = 600.0  # longest wait for a host to start a sandbox, of which it may have to fetch the image
_END_S = 60.0  # longest wait for a host to end a sandbox
_KILL_S = 2 * KILL_S  # the same for a command


class RemoteIsolation:
    """Starts sandboxes of one isolation on hosts; see `Isolation`."""

    def __init__(self, name: str, hosts: SandboxHosts, *, warm: int = 0) -> None:
        """Args:
        name: the isolation that the hosts use.
        warm: how many sandboxes of each spec a host keeps started.
        """
        self.name = name
        self._hosts = hosts
        self._warm = warm
        self._digests = Digests()
        self._sandboxes: set[RemoteSandbox] = set()

    async def start(self, spec: SandboxSpec) -> RemoteSandbox:
        """Wait for a place, and start a sandbox there.

        Raises:
            SandboxError: it cannot be started, or no host had a place in time.
        """
        digest = await asyncio.to_thread(self._digests.of, spec.folder) if spec.folder is not None else None
        place = await self._hosts.place()
        try:
            async with asyncio.timeout(_START_S):
                started = await self._started(place, spec, digest)
        except BaseException as error:
            place.connection.transport.abort()
            self._hosts.free(place)
            if isinstance(error, TimeoutError):
                raise SandboxError(
                    f"the sandbox host at {place.url} started no sandbox within {_START_S:g} s"
                ) from error
            raise
        sandbox = RemoteSandbox(place, started, self._forget)
        self._sandboxes.add(sandbox)
        return sandbox

    async def close(self) -> None:
        """End every sandbox."""
        await asyncio.gather(*(sandbox.end() for sandbox in list(self._sandboxes)))

    async def _started(self, place: PlaceOnHost, spec: SandboxSpec, digest: str | None) -> Mapping[str, Any]:
        request = {
            "isolation": self.name,
            "spec": spec_as_json(spec),
            "folder": digest,
            "warm": self._warm,
        }
        with _lost_as_errors(place.url):
            await place.connection.send(json.dumps(request))
            answer = json.loads(await place.connection.recv())
            if answer["is"] == "folder wanted":
                assert spec.folder is not None
                await send(place.connection, {}, await asyncio.to_thread(packed, spec.folder))
                answer = json.loads(await place.connection.recv())
        if answer["is"] == "error":
            kind = SandboxUnavailable if answer["is_unavailable"] else SandboxError
            raise kind(f"{place.url}: {answer['message']}")
        return cast("Mapping[str, Any]", answer)

    def _forget(self, sandbox: RemoteSandbox) -> None:
        self._sandboxes.discard(sandbox)
        self._hosts.free(sandbox.place)


class RemoteSandbox:
    """See `Sandbox`."""

    def __init__(self, place: PlaceOnHost, started: Mapping[str, Any], ended: Any) -> None:
        self.place = place
        self._workdir: str = started["workdir"]
        self._relays: bool = started["relays"]
        self._model_server: str | None = started["model_server"]
        self._connection = place.connection
        self._busy = asyncio.Lock()
        self._is_ended = False
        self._ended = ended

    @property
    def workdir(self) -> str:
        return self._workdir

    def inner_url(self, url: str) -> str:
        return relayed_url(url) if self._relays else at_server(url, self._model_server)

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        streams: tuple[int, int] | None = None,
        kept_bytes: int = KEPT_OUTPUT,
        model_url: str | None = None,
        mounts: Sequence[Mount] = (),
        log: BinaryIO | None = None,
    ) -> Finished:
        if not argv:
            raise SandboxError("the command is empty")
        request = {
            "do": "run",
            "argv": list(argv),
            "timeout_s": timeout_s,
            "environment": dict(environment or {}),
            "has_streams": streams is not None,
            "kept_bytes": kept_bytes,
            "model_url": model_url,
            "has_log": log is not None,
            "mounts": [{"inside": mount.inside, "is_writable": mount.is_writable} for mount in mounts],
        }
        async with self._busy:
            if self._is_ended:
                raise SandboxError("the sandbox has ended")
            archives = [await asyncio.to_thread(packed, mount.host) for mount in mounts]
            command = _Command(self._connection, self.place.url, streams, log)
            running = asyncio.create_task(command.run(request, [stdin, *archives]))
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                await self._kill(command, running)
                raise
            finished, written = running.result()
            for mount, archive in zip((mount for mount in mounts if mount.is_writable), written, strict=True):
                await asyncio.to_thread(replace_content, mount.host, archive)
            return finished

    async def read(self, path: str, *, most_bytes: int = 1 << 20) -> bytes:
        return await read_file(self, path, most_bytes=most_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await write_file(self, path, data)

    async def end(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if self._busy.locked():  # without its connection, the host ends the running command too
            self._connection.transport.abort()
            self._ended(self)
            return
        try:
            async with asyncio.timeout(_END_S):
                await self._connection.send(json.dumps({"do": "end"}))
                answer: Mapping[str, Any] = {}
                while answer.get("is") not in ("ended", "error"):
                    message = await self._connection.recv()
                    answer = json.loads(message) if isinstance(message, str) else {}
        except websocket_errors():
            return  # the host has gone; it, or its keepers, have ended the sandbox
        except TimeoutError as error:
            raise SandboxError(f"a sandbox on {self.place.url} did not end within {_END_S:g} s") from error
        finally:
            self._connection.transport.abort()
            self._ended(self)
        if answer["is"] == "error":
            raise SandboxError(f"{self.place.url}: {answer['message']}")

    async def _kill(self, command: _Command, running: asyncio.Task[Any]) -> None:
        """Kill a command that is no longer waited for; without an answer, give up the sandbox."""
        try:
            async with asyncio.timeout(_KILL_S):
                await command.kill()
                await asyncio.wait({running})
        except TimeoutError:
            self._connection.transport.abort()
            await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # retrieved, so that asyncio does not log it: the caller has gone


class _Command:
    """One command, from its request to its answer."""

    def __init__(
        self, connection: Any, url: str, streams: tuple[int, int] | None, log: BinaryIO | None
    ) -> None:
        self._connection = connection
        self._url = url
        self._streams = streams
        self._log = log
        self._sent = asyncio.Event()

    async def run(self, request: Mapping[str, Any], data: Sequence[bytes]) -> tuple[Finished, list[bytes]]:
        """Send the request, and return how the command ended, and the archives of its writable mounts.

        Raises:
            SandboxError: the host says so, or is lost.
        """
        with _lost_as_errors(self._url):
            async with _Streams(self._connection, self._streams) as streams:
                try:
                    await send(self._connection, request, *data)
                finally:
                    self._sent.set()
                streams.start()
                while True:
                    message = await self._connection.recv()
                    if isinstance(message, str):
                        answer = json.loads(message)
                        if answer["is"] != "ack":
                            break
                        streams.acknowledged.set()
                    elif message[:1] == STREAM:
                        streams.received(message[1:])
                    elif message[:1] == LOG and self._log is not None:
                        self._log.write(message[1:])
                    else:
                        assert message[:1] != DATA, "data follows an answer"
            if answer["is"] == "error":
                raise SandboxError(answer["message"])
            if answer["is"] == "killed":
                raise SandboxError("the command was killed")
            stdout, stderr, *written = await receive_data(self._connection, answer)
        lengths = answer["written"]
        finished = Finished(
            answer["status"],
            Output(stdout, lengths[0]),
            Output(stderr, lengths[1]),
            timed_out=answer["timed_out"],
            out_of_memory=answer["out_of_memory"],
        )
        return finished, written

    async def kill(self) -> None:
        """Ask for its end, when its request is sent."""
        await self._sent.wait()
        with contextlib.suppress(*websocket_errors()):
            await self._connection.send(json.dumps({"do": "kill"}))


class _Streams:
    """Carries the caller's pipes to the host and back; without pipes it does nothing."""

    def __init__(self, connection: Any, pipes: tuple[int, int] | None) -> None:
        self._connection = connection
        self._pipes = pipes
        self._tasks: set[asyncio.Task[None]] = set()
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.acknowledged = asyncio.Event()

    def received(self, data: bytes) -> None:
        """Take a piece of the command's standard output."""
        self._pieces.put_nowait(data)

    async def __aenter__(self) -> _Streams:
        if self._pipes is not None:
            self._reader, self._receiving = await open_reader(os.dup(self._pipes[0]))
            try:
                self._writer = await open_writer(os.dup(self._pipes[1]))
            except BaseException:
                self._receiving.close()
                raise
        return self

    def start(self) -> None:
        """Begin to carry, when the host has the request."""
        if self._pipes is not None:
            self._tasks = {asyncio.create_task(self._send()), asyncio.create_task(self._write())}

    async def __aexit__(self, *_: object) -> None:
        if self._pipes is not None:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._receiving.close()
            self._writer.close()

    async def _send(self) -> None:
        with contextlib.suppress(*websocket_errors()):  # `run` says that the host is lost
            while data := await self._reader.read(PIECE):
                self.acknowledged.clear()
                await self._connection.send(STREAM + data)
                await self.acknowledged.wait()
            await self._connection.send(json.dumps({"do": "eof"}))

    async def _write(self) -> None:
        with contextlib.suppress(OSError, *websocket_errors()):  # the caller reads no more
            while True:
                self._writer.write(await self._pieces.get())
                await self._writer.drain()
                await self._connection.send(json.dumps({"do": "ack"}))


@contextlib.contextmanager
def _lost_as_errors(url: str) -> Any:
    """Translate the loss of a connection. Raises SandboxError."""
    try:
        yield
    except websocket_errors() as error:
        raise SandboxError(f"the sandbox host at {url} is lost ({error}), and the sandbox with it") from error
