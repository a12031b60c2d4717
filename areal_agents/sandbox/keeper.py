"""This process's side of the launcher: starts keepers, and runs one command at a time through a keeper."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.errors import SandboxError
from areal_agents.process_control import KILL_S, end_process
from areal_agents.sandbox.home import SandboxHome
from areal_agents.sandbox.output import Log, read_tail, write_all
from areal_agents.sandbox.relay import MODEL_PORT, Relay
from areal_agents.sandbox.sandbox import Finished

_PROGRAM = Path(__file__).with_name("launcher.py")
_START_S = 60.0  # longest wait in seconds for a keeper to set a sandbox up, a copy of its folder included
_END_S = 30.0  # longest wait in seconds for a keeper to remove a sandbox
_PIPE_S = 1.0  # longest wait in seconds for the rest of the output of a command that has ended
_HEAD = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Command:
    """What a keeper executes.

    Attributes:
        argv: the program and its arguments, with those of the isolation around it.
        environment: all its variables.
        folder: where it starts; "" where the keeper is.
        own_network: whether it gets a network with only a loopback interface.
        file_bytes: the largest file that it may write; None: no limit.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    own_network: bool
    file_bytes: int | None


class Launcher:
    """The process that forks keepers. Its end, and that of this process, end every sandbox."""

    def __init__(self, home: SandboxHome) -> None:
        self._home = home
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), str(theirs.fileno())],
                pass_fds=(theirs.fileno(), home.lock),
                env={},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    async def keeper(self, request: Mapping[str, Any]) -> Keeper:
        """Start a keeper. Raises SandboxError if it cannot set the sandbox up."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                # A request is small, and the launcher does nothing but read requests.
                data = json.dumps(request).encode()
                socket.send_fds(self._socket, [_HEAD.pack(len(data))], [theirs.fileno()])
                self._socket.sendall(data)
            except OSError as error:
                ours.close()
                raise SandboxError("the launcher of sandboxes has ended") from error
        keeper = Keeper(ours)
        try:
            async with asyncio.timeout(_START_S):
                await keeper.is_ready()
        except BaseException as error:
            await keeper.end()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"a sandbox was not ready within {_START_S:g} s") from error
            raise
        return keeper

    def close(self) -> None:
        """End the launcher; its keepers have ended."""
        self._socket.close()
        end_process(self._process, grace_s=KILL_S)


class Keeper:
    """A connection to the keeper of one sandbox."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._busy = asyncio.Lock()
        self._ended = False

    async def is_ready(self) -> None:
        """Return when the sandbox is set up. Raises SandboxError if it cannot be."""
        await self._answer()

    async def run(
        self,
        command: Command,
        *,
        stdin: bytes,
        streams: tuple[int, int] | None,
        timeout_s: float | None,
        kept_bytes: int,
        model_url: str | None,
        log: Log | None,
    ) -> Finished:
        """Run a command and kill what it left. If this is cancelled, the command is killed too.

        Args:
            streams: see `Sandbox.run`.

        Raises:
            SandboxError: the command cannot be executed, or the sandbox has ended.
        """
        async with self._busy, contextlib.AsyncExitStack() as stack:
            if self._ended:
                raise SandboxError("the sandbox has ended")
            inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
            theirs = (inputs[0], outputs[1], errors[1])
            try:
                writing = await write_all(inputs[1], stdin)
                stack.callback(writing.abort)
                reading = [await read_tail(pipe[0], kept_bytes, log) for pipe in (outputs, errors)]
                for transport, _ in reading:
                    stack.callback(transport.close)
                relays = command.own_network and model_url is not None
                await self._send(
                    {
                        "argv": list(command.argv),
                        "environment": dict(command.environment),
                        "folder": command.folder,
                        "own_network": command.own_network,
                        "file_bytes": command.file_bytes,
                        "listen": MODEL_PORT if relays else None,
                    },
                    theirs if streams is None else (*streams, errors[1]),
                )
            finally:
                for fd in theirs:
                    os.close(fd)
            ending = asyncio.create_task(self._ended_command(stack, model_url if relays else None))
            ended_itself = await self._until(ending, timeout_s)
            for _, tail in reading:
                await asyncio.wait({tail.closed}, timeout=_PIPE_S)
            stdout, stderr = (tail.output() for _, tail in reading)
            return Finished(ending.result(), stdout, stderr, timed_out=not ended_itself)

    async def end(self) -> None:
        """Let the keeper kill and remove everything, and wait for it."""
        if self._ended:
            return
        self._ended = True
        self._socket.shutdown(socket.SHUT_WR)  # it reads the end, and closes its side when all is removed
        try:
            async with asyncio.timeout(_END_S):
                while await asyncio.get_running_loop().sock_recv(self._socket, 65_536):
                    pass
        except ConnectionError:
            pass  # it closed with something of ours unread
        except TimeoutError as error:
            raise SandboxError(f"a sandbox did not end within {_END_S:g} s") from error
        finally:
            self._socket.close()

    async def _ended_command(self, stack: contextlib.AsyncExitStack, model_url: str | None) -> int:
        """Relay for the command until it ends, and return its exit status."""
        answer, fds = await self._message()
        if "listening" in answer:
            listener = socket.socket(fileno=fds[0])
            listener.setblocking(False)
            assert model_url is not None
            relay = Relay(model_url)
            stack.push_async_callback(relay.close)
            await relay.start(listener)
            answer, _ = await self._message()
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer["status"]

    async def _until(self, ending: asyncio.Task[int], timeout_s: float | None) -> bool:
        """Wait for the end of a command; kill it at the time limit, or if the wait is cancelled.

        Returns:
            Whether it ended by itself.
        """
        try:
            done, _ = await asyncio.wait({ending}, timeout=timeout_s)
            if done:
                return True
        except asyncio.CancelledError:
            await self._kill(ending)
            raise
        await self._kill(ending)
        return False

    async def _kill(self, ending: asyncio.Task[int]) -> None:
        await self._send({"kill": True}, ())
        done, _ = await asyncio.wait({ending}, timeout=KILL_S)
        if not done:
            ending.cancel()
            raise SandboxError(f"a command was not killed within {KILL_S:g} s")

    async def _answer(self) -> dict[str, Any]:
        answer, _ = await self._message()
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer

    async def _send(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        data = json.dumps(message).encode()
        try:
            socket.send_fds(self._socket, [_HEAD.pack(len(data))], list(fds))
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except OSError as error:
            raise SandboxError("the keeper of the sandbox has ended") from error

    async def _message(self) -> tuple[dict[str, Any], list[int]]:
        try:
            head, fds = await self._head()
            data = await self._exactly(_HEAD.unpack(head)[0])
        except (OSError, EOFError) as error:
            raise SandboxError("the keeper of the sandbox has ended") from error
        return json.loads(data), fds

    async def _head(self) -> tuple[bytes, list[int]]:
        """Read the length of a message, with which file descriptors travel."""
        loop = asyncio.get_running_loop()
        while True:
            readable = asyncio.Event()
            loop.add_reader(self._socket, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._socket)
            try:
                head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, 4)
            except BlockingIOError:
                continue
            if not head:
                raise EOFError
            return head + await self._exactly(_HEAD.size - len(head)), list(fds)

    async def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await asyncio.get_running_loop().sock_recv(self._socket, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)
