"""Serves the sandboxes of this machine to rollout processes on others.

A sandbox belongs to the connection that started it: when the connection ends or is silent, for whatever
reason, the sandbox ends with everything in it. So a rollout process that dies leaves nothing here. A caller
without the token gets 401.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, cast

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from areal_agents.errors import SandboxError, SandboxUnavailable
from areal_agents.sandbox.home import SandboxHome
from areal_agents.sandbox.isolations import IsolationOnFirstUse
from areal_agents.sandbox.pool import SandboxPool
from areal_agents.sandbox.remote.archives import Digests, KeptFolders, packed, unpack
from areal_agents.sandbox.remote.messages import (
    GOODBYE_S,
    LOG,
    LONGEST_MESSAGE,
    MOST_DATA,
    PATH,
    PIECE,
    PING_S,
    SILENT_S,
    STREAM,
    at_server,
    receive_data,
    send,
    spec_as_json,
    spec_from_json,
)
from areal_agents.sandbox.remote.pipes import open_reader, open_writer
from areal_agents.sandbox.sandbox import Finished, Mount, Sandbox, SandboxSpec
from areal_agents.tls import TlsConfig, server_context

KEPT_POOLS = 8  # kinds of warm sandboxes; the least recently used kind ends
_START_S = 30.0  # longest wait for the first request of a connection
_OUTPUT_S = 60.0  # longest wait for a caller to read the rest of the output of a command that has ended
_KILLED_OUTPUT_S = 1.0  # the same after it was killed
_PROBE = "http://127.0.0.1:1/"

logger = logging.getLogger(__name__)


class SandboxHost:
    """Starts sandboxes for the callers that have the token, at most `places` at the same time."""

    def __init__(
        self, token: str, *, places: int, model_server: str | None = None, base: Path | None = None
    ) -> None:
        """Args:
        token: what a caller sends as its bearer token.
        places: how many sandboxes are given out at the same time; warm ones do not count.
        model_server: the URL of the server that commands call in place of the one that their caller names,
            such as a proxy that is nearer; None: the one that is named.
        base: see `SandboxHome.open`.
        """
        self._token = token
        self._places = places
        self._model_server = model_server
        self._taken = 0
        self._home = SandboxHome.open(base)
        self._folders = KeptFolders(self._home.folder / "folders")
        self._mounts = self._home.folder / "mounts"
        self._mounts.mkdir()
        self._isolations: dict[str, IsolationOnFirstUse] = {}
        self._pools: dict[str, _Pool] = {}  # by what they start; the least recently used first
        self._server: Server | None = None

    async def listen(self, listener: socket.socket, tls: TlsConfig | None = None) -> None:
        """Accept callers on a listening socket until `close`; with `tls`, by encrypted connections."""
        self._server = await serve(
            self._connected,
            sock=listener,
            ssl=None if tls is None else server_context(tls),
            process_request=self._admitted,
            compression=None,
            max_size=LONGEST_MESSAGE,
            ping_interval=PING_S,
            ping_timeout=SILENT_S,
            close_timeout=GOODBYE_S,
        )

    async def warm_up(self, isolation: str, spec: SandboxSpec, *, warm: int) -> None:
        """Start sandboxes ahead of their callers, whose folder has the same content as `spec.folder`.

        Raises:
            SandboxError: one cannot be started here.
        """
        digest = None
        if spec.folder is not None:
            digest = await asyncio.to_thread(Digests().of, spec.folder)
            await self._folders.add(digest, await asyncio.to_thread(packed, spec.folder))
        pool = await self._pool(isolation, spec_as_json(spec), digest, warm)
        assert pool is not None, "the folder is here"
        await pool.sandboxes.fill()

    async def close(self) -> None:
        """End every sandbox, and every connection."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        for pool in self._pools.values():
            await pool.sandboxes.close()
        for isolation in self._isolations.values():
            await isolation.close()
        await asyncio.to_thread(self._home.close)

    def _admitted(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer what is not a caller with the token; None lets the caller in."""
        if request.path == "/health":
            return connection.respond(HTTPStatus.OK, "ok\n")
        if request.path != PATH:
            return connection.respond(HTTPStatus.NOT_FOUND, "there is nothing here\n")
        # As websockets decodes it; it may be there several times, which `get` does not bear.
        given = "".join(request.headers.get_all("Authorization")).encode(errors="surrogateescape")
        if not hmac.compare_digest(given, b"Bearer " + self._token.encode()):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "the token of this sandbox host is needed\n")
        return None

    async def _connected(self, connection: ServerConnection) -> None:
        """Serve one sandbox from its start to its end."""
        if self._taken >= self._places:
            with contextlib.suppress(ConnectionClosed):
                await send(connection, {"is": "full"})
            return
        self._taken += 1
        try:
            await send(connection, {"is": "place", "free": self._places - self._taken})
            await self._serve(connection)
        except ConnectionClosed:
            pass  # the caller has gone or is silent; the sandbox has ended
        except (SandboxError, TimeoutError) as error:
            message = str(error) or "no request has come"
            is_unavailable = isinstance(error, SandboxUnavailable)
            with contextlib.suppress(ConnectionClosed):
                await send(connection, {"is": "error", "message": message, "is_unavailable": is_unavailable})
        finally:
            self._taken -= 1

    async def _serve(self, connection: ServerConnection) -> None:
        async with asyncio.timeout(_START_S):
            request = json.loads(await connection.recv())
        async with self._started(connection, request, request["folder"]) as sandbox:
            relays = sandbox.inner_url(_PROBE) != _PROBE
            server = self._model_server
            answer = {"is": "started", "workdir": sandbox.workdir, "relays": relays, "model_server": server}
            await send(connection, answer)
            await _Commands(connection, sandbox, server, self._mounts).serve()
        await send(connection, {"is": "ended"})

    @asynccontextmanager
    async def _started(
        self, connection: ServerConnection, request: Mapping[str, Any], digest: str | None
    ) -> AsyncIterator[Sandbox]:
        """Start a sandbox or take a warm one; at the end of the block it has ended."""
        isolation, tree = request["isolation"], request["spec"]
        pool = await self._pool(isolation, tree, digest, request["warm"])
        if pool is None:
            await send(connection, {"is": "folder wanted"})
            [archive] = await receive_data(connection, json.loads(await connection.recv()))
            await self._folders.add(cast(str, digest), archive)
            del archive
            pool = await self._pool(isolation, tree, digest, request["warm"])
            assert pool is not None, "the folder is here"
        if digest is not None:
            self._folders.hold(digest)
        try:
            sandbox = await pool.sandboxes.take()
            try:
                yield sandbox
            finally:
                await sandbox.end()
        finally:
            if digest is not None:
                self._folders.release(digest)
                await self._folders.remove_unused()

    async def _pool(
        self, isolation: str, tree: Mapping[str, Any], digest: str | None, warm: int
    ) -> _Pool | None:
        """Return the pool of sandboxes of one kind; None if their folder is not here.

        A kind of which none are kept warm has a pool for one sandbox.
        """
        key = json.dumps([isolation, tree, digest, warm], sort_keys=True)
        if key in self._pools:
            pool = self._pools[key] = self._pools.pop(key)
            return pool
        folder = None
        if digest is not None and (folder := self._folders.hold(digest)) is None:
            return None
        try:
            spec = spec_from_json(tree, folder)
        except SandboxError:
            if digest is not None:
                self._folders.release(digest)
            raise
        started = self._isolations.setdefault(isolation, IsolationOnFirstUse(isolation))
        pool = _Pool(SandboxPool(started, spec, warm=warm), digest)
        if not warm:
            if digest is not None:
                self._folders.release(digest)
            return pool
        self._pools[key] = pool
        while len(self._pools) > KEPT_POOLS:
            oldest = self._pools.pop(next(iter(self._pools)))
            await oldest.sandboxes.close()
            if oldest.digest is not None:
                self._folders.release(oldest.digest)
        return pool


class _Pool:
    """Warm sandboxes of one kind, and the digest of the folder that they are copies of."""

    def __init__(self, sandboxes: SandboxPool, digest: str | None) -> None:
        self.sandboxes = sandboxes
        self.digest = digest


class _Commands:
    """Runs the commands of one connection in its sandbox."""

    def __init__(
        self, connection: ServerConnection, sandbox: Sandbox, model_server: str | None, mounts: Path
    ) -> None:
        self._connection = connection
        self._sandbox = sandbox
        self._model_server = model_server
        self._mounts = mounts
        self._command: _Command | None = None

    async def serve(self) -> None:
        """Run commands until the caller ends the sandbox. Raises ConnectionClosed when it has gone."""
        try:
            while True:
                message = await self._connection.recv()
                if isinstance(message, bytes):
                    if self._command is not None:  # else the command has ended in the meantime
                        self._command.feed(message[1:])
                    continue
                request = json.loads(message)
                match request["do"]:
                    case "run":
                        await self._finish()
                        data = await receive_data(self._connection, request)
                        if request["model_url"] is not None:
                            request["model_url"] = at_server(request["model_url"], self._model_server)
                        self._command = _Command(self._connection, self._sandbox, request, data, self._mounts)
                    case "kill" if self._command is not None:
                        self._command.kill()
                    case "eof" if self._command is not None:
                        self._command.feed(b"")
                    case "ack" if self._command is not None:
                        self._command.acknowledged.set()
                    case "end":
                        return
        finally:
            if self._command is not None:
                self._command.kill()
                await self._finish()

    async def _finish(self) -> None:
        """Wait for the end of the command, and raise what its answer has raised."""
        command, self._command = self._command, None
        if command is not None:
            await command.done


class _Command:
    """A running command, from its request to its answer."""

    def __init__(
        self,
        connection: ServerConnection,
        sandbox: Sandbox,
        request: Mapping[str, Any],
        data: list[bytes],
        folder: Path,
    ) -> None:
        """Args:
        data: its standard input, and an archive for each folder that only it sees.
        folder: where these folders are unpacked.
        """
        self._connection = connection
        self._folder = folder
        self._sandbox = sandbox
        self._request = request
        self._stdin, self._mounts = data[0], data[1:]
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._log: asyncio.Queue[bytes] = asyncio.Queue()  # bounded by the longest log
        self._running: asyncio.Task[Finished] | None = None
        self._is_killed = False
        self.acknowledged = asyncio.Event()
        self.done = asyncio.create_task(self._run())
        self.done.add_done_callback(self._close_if_failed)

    def feed(self, data: bytes) -> None:
        """Give it a piece of its standard input; b"" ends it."""
        self._input.put_nowait(data)

    def kill(self) -> None:
        """Kill it; the answer says so, unless it had ended."""
        self._is_killed = True
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                mounts = await asyncio.to_thread(self._mounted, stack) if self._mounts else []
                finished = await self._finished(mounts)
                written = [] if finished is None else await self._written(finished, mounts)
            except (SandboxError, OSError) as error:
                await send(self._connection, {"is": "error", "message": str(error)})
                return
            if finished is None:
                await send(self._connection, {"is": "killed"})
                return
        await send(
            self._connection,
            {
                "is": "finished",
                "status": finished.status,
                "timed_out": finished.timed_out,
                "out_of_memory": finished.out_of_memory,
                "written": [finished.stdout.length, finished.stderr.length],
            },
            finished.stdout.kept,
            finished.stderr.kept,
            *written,
        )

    async def _written(self, finished: Finished, mounts: Sequence[Mount]) -> list[bytes]:
        """Return archives of what the command wrote. Raises SandboxError if they are too long together."""
        left = MOST_DATA - len(finished.stdout.kept) - len(finished.stderr.kept)
        archives = []
        for mount in mounts:
            if mount.is_writable:
                archives.append(await asyncio.to_thread(packed, mount.host, most_bytes=left))
                left -= len(archives[-1])
        return archives

    def _mounted(self, stack: contextlib.ExitStack) -> list[Mount]:
        """Unpack the folders that the command sees, which are removed with `stack`."""
        mounts = []
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder)))
        for number, (mount, archive) in enumerate(zip(self._request["mounts"], self._mounts, strict=True)):
            host = folder / str(number)
            host.mkdir()
            unpack(archive, host, is_trusted=True)
            mounts.append(Mount(mount["inside"], host, is_writable=mount["is_writable"]))
        return mounts

    async def _finished(self, mounts: list[Mount]) -> Finished | None:
        """Run the command; None if it was killed on request."""
        request = self._request
        streams = await _Streams.open(self) if request["has_streams"] else None
        logging_ = asyncio.create_task(self._send_log())
        running = self._running = asyncio.create_task(
            self._sandbox.run(
                request["argv"],
                timeout_s=request["timeout_s"],
                environment=request["environment"],
                stdin=self._stdin,
                streams=streams.theirs if streams is not None else None,
                kept_bytes=request["kept_bytes"],
                model_url=request["model_url"],
                mounts=mounts,
                log=cast(BinaryIO, _Written(self._log)) if request["has_log"] else None,
            )
        )
        if self._is_killed:
            running.cancel()
        try:
            await asyncio.wait({running})
            if streams is not None:
                await streams.close(_KILLED_OUTPUT_S if self._is_killed else _OUTPUT_S)
            self._log.put_nowait(b"")
            await logging_
        finally:
            logging_.cancel()
            if streams is not None:
                await streams.close(0.0)
        return None if running.cancelled() else running.result()

    async def _send_log(self) -> None:
        while data := await self._log.get():
            for start in range(0, len(data), PIECE):
                await self._connection.send(LOG + data[start : start + PIECE])

    def _close_if_failed(self, done: asyncio.Task[None]) -> None:
        """End the connection if there is no answer, for which the caller would wait."""
        if done.cancelled() or done.exception() is not None:
            self._connection.transport.abort()

    async def next_input(self) -> bytes:
        """Return the next piece of the standard input; b"" at its end."""
        return await self._input.get()

    async def send(self, message: str | bytes) -> None:
        """Send a message to the caller."""
        await self._connection.send(message)


class _Streams:
    """The standard input and output of a command whose caller talks with it."""

    def __init__(self, command: _Command, theirs: tuple[int, int]) -> None:
        self._command = command
        self.theirs = theirs
        self._is_open = True
        self._tasks: list[asyncio.Task[None]] = []
        self._transports: list[asyncio.BaseTransport] = []

    @classmethod
    async def open(cls, command: _Command) -> _Streams:
        """Open both pipes, or leave none open. Raises OSError."""
        with contextlib.ExitStack() as opened:
            inputs = os.pipe()
            opened.callback(os.close, inputs[0])
            writer = await open_writer(inputs[1])
            opened.callback(writer.transport.close)
            outputs = os.pipe()
            opened.callback(os.close, outputs[1])
            reader, receiving = await open_reader(outputs[0])
            opened.pop_all()  # `close` closes them
        streams = cls(command, (inputs[0], outputs[1]))
        streams._transports = [writer.transport, receiving]
        streams._tasks = [
            asyncio.create_task(streams._feed(writer)),
            asyncio.create_task(streams._send(reader)),
        ]
        return streams

    async def close(self, timeout_s: float) -> None:
        """Close the command's ends, and wait until the caller has received the output; once."""
        if not self._is_open:
            return
        self._is_open = False
        feeding, sending = self._tasks
        for fd in self.theirs:
            os.close(fd)
        feeding.cancel()
        await asyncio.wait({sending}, timeout=timeout_s)
        sending.cancel()
        await asyncio.wait({feeding, sending})
        for transport in self._transports:
            transport.close()  # a writer with something left finds that nobody can read it

    async def _feed(self, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await self._command.next_input():
                writer.write(data)
                await writer.drain()
                await self._command.send(json.dumps({"is": "ack"}))
        except OSError:
            pass  # the command has closed its input
        finally:
            writer.close()

    async def _send(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(PIECE):
            self._command.acknowledged.clear()
            await self._command.send(STREAM + data)
            await self._command.acknowledged.wait()


class _Written:
    """Takes the first bytes of the output, as an open file does, and hands them on."""

    def __init__(self, pieces: asyncio.Queue[bytes]) -> None:
        self._pieces = pieces

    def write(self, data: bytes) -> int:
        if data:
            self._pieces.put_nowait(data)
        return len(data)
