"""Runs a synchronous agent in worker processes. Cancelling an episode ends its process and no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.agent_process import ChildProcess

START_TIMEOUT_S = 120.0
EXIT_S = 10.0  # longest wait for a worker to exit after the end of its output


class WorkerAgent:
    """A pool that starts processes as they are needed, at most `size`, and replaces those that ended.

    The agent's output goes to this process's standard error.
    """

    must_reward = True

    def __init__(self, spec: str, *, size: int) -> None:
        self.capacity: int | None = size
        self._spec = spec
        self._places = asyncio.Semaphore(size)
        self._idle: list[_AgentWorker] = []
        self._all: set[_AgentWorker] = set()

    async def run(self, task: Mapping[str, Any], ep: Episode) -> Any:
        """Run one episode. Raises AgentError with the error that the agent raised."""
        async with self._places:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                value = await worker.run(task, ep)
            except _Raised as raised:
                self._idle.append(worker)
                raise AgentError(str(raised)) from None
            except BaseException:
                await self._discard(worker)
                await worker.report_rest(ep)
                raise
            self._idle.append(worker)
            return value

    async def close(self) -> None:
        """End every process."""
        self._idle.clear()
        await asyncio.gather(*(self._discard(worker) for worker in tuple(self._all)))

    async def _start(self) -> _AgentWorker:
        command = [sys.executable, "-m", "areal_agents.rollout.agents.worker", self._spec]
        process = await ChildProcess.start(command, environment=os.environ, lines=True)
        worker = _AgentWorker(process)
        self._all.add(worker)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.ready()
        except TimeoutError as error:
            await self._discard(worker)
            raise AgentError(f"{self._spec} was not imported within {START_TIMEOUT_S:.0f} s") from error
        except BaseException:
            await self._discard(worker)
            raise
        return worker

    async def _discard(self, worker: _AgentWorker) -> None:
        # Shielded: a second cancellation must not leave the process behind.
        await asyncio.shield(worker.process.end())
        self._all.discard(worker)


class _Raised(Exception):
    """The agent raised an exception; its process can run further episodes."""


class _AgentWorker:
    def __init__(self, process: ChildProcess) -> None:
        self.process = process

    async def ready(self) -> None:
        message = await self._receive()
        if "error" in message:
            raise AgentError(message["error"])

    async def run(self, task: Mapping[str, Any], ep: Episode) -> Any:
        request: dict[str, Any] = {
            "task": dict(task),
            "id": ep.id,
            "base_url": ep.base_url,
            "api_key": ep.api_key,
        }
        if ep.fork is not None:
            request["fork"] = asdict(ep.fork)
        self.process.send(json.dumps(request).encode() + b"\n")
        while True:
            message = await self._receive()
            if "report" in message:
                ep.report(*message["report"])
            elif "error" in message:
                raise _Raised(message["error"])
            else:
                return message["value"]

    async def report_rest(self, ep: Episode) -> None:
        """Pass on what an ended process had reported before, such as a reward just before the time limit."""
        with contextlib.suppress(TimeoutError):  # something else holds its pipe open
            async with asyncio.timeout(EXIT_S):
                while (line := await self.process.line()).endswith(b"\n"):
                    message = json.loads(line)
                    if "report" in message:
                        ep.report(*message["report"])

    async def _receive(self) -> dict[str, Any]:
        line = await self.process.line()
        if line:
            return json.loads(line)
        try:
            async with asyncio.timeout(EXIT_S):
                status = await self.process.wait()
        except TimeoutError as error:
            raise AgentError("the agent closed the pipe of its worker process") from error
        raise AgentError(f"the agent's worker process died (exit status {status})")
