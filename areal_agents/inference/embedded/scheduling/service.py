"""Connects the event loop with the engine's thread: futures for finished requests.

Invariant: a rid is in `_active` exactly while its request is with the scheduler, so no rid runs twice.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from areal_agents.core.completion import SamplingParams
from areal_agents.errors import EngineUnavailable, RequestError
from areal_agents.inference.embedded.http.protocol import MAX_SEED, RequestLimits
from areal_agents.inference.embedded.model.architecture import Architecture
from areal_agents.inference.embedded.model.runner import ModelRunner
from areal_agents.inference.embedded.model.served import ServedModels
from areal_agents.inference.embedded.model.weights import Weights
from areal_agents.inference.embedded.scheduling.grammar import Grammars, TokenMatcher
from areal_agents.inference.embedded.scheduling.request import Request
from areal_agents.inference.embedded.scheduling.scheduler import Scheduler
from areal_agents.inference.embedded.scheduling.text import Detokenizer
from areal_agents.inference.embedded.scheduling.worker import EngineThread, Notice
from areal_agents.inference.embedded.updates.joined_groups import WeightGroups
from areal_agents.inference.embedded.updates.updates import WeightUpdates
from areal_agents.inference.engine import PauseMode

COMPILE_LIMIT_S = 60.0


class EngineService:
    """The interface for the routes. All methods run in the event loop except `_deliver` and `_fail`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        arch: Architecture,
        detokenizer: Detokenizer,
        weights: Weights,
        groups: WeightGroups,
        *,
        model_path: str,
        max_context: int,
        seed: int,
        info: dict[str, Any],
    ) -> None:
        self.detokenizer = detokenizer
        self.limits = RequestLimits(arch.vocab_size, max_context, detokenizer.available)
        self._grammars = Grammars(detokenizer.tokenizer, arch.vocab_size, arch.eos_ids)
        self._compilers = ThreadPoolExecutor(2, "grammars")
        self._scheduler = scheduler
        self._arch = arch
        self._info = info
        self._seeds = itertools.count(int(np.random.default_rng(seed).integers(MAX_SEED // 2)))
        self._active: dict[str, asyncio.Future[None]] = {}
        self._streams: dict[str, asyncio.Event] = {}
        self.failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(scheduler, deliver=self._deliver, on_failure=self._fail)
        self.notify = self._thread.notify
        self.models = ServedModels(self._thread, runner, arch, weights, model_path=model_path)
        self.groups = groups
        self.updates = WeightUpdates(self.models, groups, arch)
        self.weight_bytes = weights.nbytes

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine's thread; results are delivered into `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Abort running requests and end the threads."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._thread.stop()

    def check(self) -> None:
        """Raise EngineUnavailable if the engine's thread has failed."""
        if self.failure is not None:
            raise EngineUnavailable(f"the engine has failed: {self.failure!r}")

    def next_seed(self) -> int:
        """Return a seed for a request without one."""
        return next(self._seeds)

    async def run(self, request: Request) -> None:
        """Return when `request` has finished; cancelling aborts it."""
        future = self._submit(request)
        try:
            await future
        except asyncio.CancelledError:
            self._thread.submit(lambda scheduler: scheduler.abort(request.rid))
            raise

    async def matcher(self, sampling: SamplingParams) -> TokenMatcher | None:
        """Return a matcher for the grammar of a request; raises RequestError if it cannot be compiled."""
        if sampling.grammar is None:
            return None
        compiling = asyncio.get_running_loop().run_in_executor(
            self._compilers, self._grammars.matcher, sampling.grammar, sampling.stop_token_ids
        )
        try:
            return await asyncio.wait_for(compiling, COMPILE_LIMIT_S)
        except TimeoutError as error:
            raise RequestError(
                f"{sampling.grammar.kind} is too large: it was not compiled within {COMPILE_LIMIT_S:g} s"
            ) from error

    def stream(self, request: Request) -> AsyncGenerator[None, None]:
        """Submit `request` and yield whenever it has new tokens, and finally when it has finished."""
        future = self._submit(request)
        event = self._streams[request.rid] = asyncio.Event()
        future.add_done_callback(lambda _: event.set())
        return self._progress(request, future, event)

    async def _progress(
        self, request: Request, future: asyncio.Future[None], event: asyncio.Event
    ) -> AsyncGenerator[None, None]:
        try:
            while not future.done():
                await event.wait()
                event.clear()
                yield
            future.result()
        finally:
            self._streams.pop(request.rid, None)
            if not future.done():
                self._thread.submit(lambda scheduler: scheduler.abort(request.rid))

    async def abort(self, rid: str | None) -> None:
        """Abort one request, or all."""
        await self._call(lambda scheduler: scheduler.abort(rid))

    def abort_soon(self) -> None:
        """Abort everything without waiting; callable from a signal handler."""
        self._thread.submit(lambda scheduler: scheduler.abort(None))

    async def pause(self, mode: PauseMode) -> None:
        """See Engine.pause."""
        await self._call(lambda scheduler: scheduler.pause(mode))

    async def resume(self) -> None:
        """See Engine.resume."""
        await self._call(lambda scheduler: scheduler.resume())

    async def use_version(self, version: str) -> None:
        """Set the version of the weights in use."""
        await self._call(lambda scheduler: scheduler.use_version(version))

    async def flush_cache(self) -> bool:
        """Drop the prefix cache; False while requests run."""
        return await self._call(lambda scheduler: scheduler.flush_cache())

    def model_info(self) -> dict[str, Any]:
        """SGLang's /model_info, with the limits beside it."""
        return {
            "model_path": self.models.model_path,
            "tokenizer_path": self.models.model_path,
            "is_generation": True,
            "weight_version": self._scheduler.version,
            "stages_weights": True,
            "vocab_size": self.limits.vocab_size,
            "context_length": self.limits.max_context,
            "model_type": self._arch.model_type,
            **self._info,
        }

    async def server_info(self) -> dict[str, Any]:
        """model_info, the current load, and the seconds in which the engine computed since its start."""
        load = await self._call(lambda scheduler: scheduler.load)
        return {**self.model_info(), **load, "busy_s": self._thread.busy_s}

    def _submit(self, request: Request) -> asyncio.Future[None]:
        self.check()
        if request.rid in self._active:
            raise RequestError(f"rid {request.rid!r} is already running")
        request.model = self.models.number(request.adapter)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._active[request.rid] = future
        self._thread.submit(lambda scheduler: scheduler.add(request))
        return future

    async def _call(self, action: Any) -> Any:
        self.check()
        return await asyncio.wrap_future(self._thread.call(action))

    def _deliver(self, notices: list[Notice]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._resolve, notices)

    def _resolve(self, notices: list[Notice]) -> None:
        for request, finished in notices:
            if not finished:
                if (event := self._streams.get(request.rid)) is not None:
                    event.set()
                continue
            future = self._active.pop(request.rid, None)
            if future is not None and not future.done():
                future.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._resolve_failed)

    def _resolve_failed(self) -> None:
        for future in self._active.values():
            if not future.done():
                future.set_exception(EngineUnavailable(f"the engine has failed: {self.failure!r}"))
        self._active.clear()
        # an engine that cannot compute exits, and `serve` raises the reason
        signal.raise_signal(signal.SIGTERM)
