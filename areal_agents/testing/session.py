"""The state of one running generation of the scripted engine.

Tokens arrive in chunks. Between two chunks a generation can be paused or aborted, and the weight version can
change; each token keeps the version with which it arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from areal_agents.core.completion import TokenIds
from areal_agents.testing.sampling import SamplingPlan
from areal_agents.testing.script import ScriptedReply

ABORTED = {"type": "abort", "message": "Aborted"}


@dataclass(frozen=True, slots=True, eq=False)
class ServedCall:
    """The request and the answer of one generation that has ended.

    Attributes:
        rid: id of the request.
        input_ids: [P] the prompt.
        body: the JSON of the request, without input_ids.
        token_ids: [C] the sampled ids.
        logprobs: [C] their logprobs.
        versions: [C] their weight versions, as in the protocol.
        finish: SGLang's finish_reason.
    """

    rid: str
    input_ids: TokenIds
    body: dict[str, Any]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]
    finish: dict[str, Any]


class Gate:
    """Whether the engine is paused, and the version that it serves."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.resumed = asyncio.Event()
        self.resumed.set()

    @property
    def paused(self) -> bool:
        """Whether generations wait before their next chunk."""
        return not self.resumed.is_set()


@dataclass(eq=False)
class ScriptedGeneration:
    """A running generation. `sampled` is the number of tokens so far; `finish` is None until it ends."""

    rid: str
    plan: SamplingPlan
    reply: ScriptedReply
    gate: Gate
    sampled: int = 0
    finish: dict[str, Any] | None = None
    versions: list[str] = field(default_factory=list)
    _aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def abort(self) -> None:
        """End the generation before its next chunk."""
        self._aborted.set()

    async def run(self) -> AsyncIterator[None]:
        """Yield after each chunk; `finish` is set after the last one."""
        delay_s = self.reply.delay_s
        while self.finish is None:
            if await self._interrupted(delay_s):
                self.finish = dict(ABORTED)
            else:
                self._arrive(min(self.reply.chunk_tokens, len(self.plan.token_ids) - self.sampled))
            delay_s = self.reply.chunk_delay_s
            yield

    async def run_to_end(self) -> None:
        """Run to the end; without a delay between chunks, all tokens arrive at once."""
        if self.reply.chunk_delay_s:
            async for _ in self.run():
                pass
        elif await self._interrupted(self.reply.delay_s):
            self.finish = dict(ABORTED)
        else:
            self._arrive(len(self.plan.token_ids))

    def _arrive(self, count: int) -> None:
        self.sampled += count
        self.versions += [self.gate.version] * count
        if self.sampled == len(self.plan.token_ids):
            self.finish = self.plan.finish

    async def _interrupted(self, delay_s: float) -> bool:
        """Wait for the delay and for the end of a pause; True if the generation was aborted meanwhile."""
        if delay_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._aborted.wait(), delay_s)
        else:
            await asyncio.sleep(0)  # lets other tasks run between two chunks
        while self.gate.paused and not self._aborted.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self.gate.resumed, self._aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return self._aborted.is_set()
