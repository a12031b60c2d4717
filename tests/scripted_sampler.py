"""An in-process `Sampler`, for behaviour that an engine cannot be made to show over HTTP.

Its script may return any completion (any version, any logprob, ids without an end) or raise any exception,
and a reply can be held back from another thread. Behaviour that is possible over HTTP is tested with
`areal_agents.testing`. tests/inference/test_sampler_contract.py tests that this sampler is a valid one.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from areal_agents.core.completion import Completion, FinishReason, SamplingParams, TokenChunk, TokenIds
from areal_agents.errors import EngineRejected
from areal_agents.inference import ModelInfo, PromptScores
from areal_agents.rendering import ChatRenderer


@dataclass
class EngineCall:
    """One generation, as the engine saw it."""

    rid: str
    input_ids: TokenIds
    sampling: SamplingParams
    completion: Completion | None = None
    streamed: bool = False


Script = Callable[[EngineCall], str | list[int] | Completion | Exception]


@dataclass
class ScriptedSampler:
    """Answers from a script. A reply that is a string gets the model's stop token; ids are used unchanged.
    Each reply takes `delay_s`, unless `hurry` is set meanwhile, possibly from another thread.
    """

    renderer: ChatRenderer
    script: Script = lambda call: "ok"
    max_context: int = 4096
    version: int = 0
    delay_s: float = 0.0
    hurry: threading.Event = field(default_factory=threading.Event)
    token_delay_s: float = 0.0
    seed: int = 0
    calls: list[EngineCall] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    async def generate(
        self,
        rid: str,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: Callable[[TokenChunk], None] | None = None,
        *,
        affinity: str = "",
        stream_interval: int = 1,
    ) -> Completion:
        self._check(input_ids)
        call = EngineCall(rid, np.array(input_ids), sampling, streamed=on_tokens is not None)
        self.calls.append(call)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._delay()
            answer = self.script(call)
        except asyncio.CancelledError:
            self.cancelled.append(rid)
            raise
        finally:
            self.running -= 1
        if isinstance(answer, Exception):
            raise answer
        call.completion = answer if isinstance(answer, Completion) else self.completion_of(answer, sampling)
        if on_tokens is not None:
            await self._stream(call.completion, on_tokens, stream_interval)
        return call.completion

    def completion_of(self, answer: str | list[int], sampling: SamplingParams) -> Completion:
        """Return a string or ids as a completion, truncated at `max_new_tokens`."""
        ids = list(answer) if isinstance(answer, list) else self.renderer.tokenizer.encode(answer)
        if isinstance(answer, str):
            ids.append(self.renderer.stop_token_ids[0])
        reason: FinishReason = "stop" if ids and ids[-1] in self.renderer.stop_token_ids else "length"
        if len(ids) > sampling.max_new_tokens:
            ids, reason = ids[: sampling.max_new_tokens], "length"
        logprobs = [-self.rng.random() * 5 for _ in ids]
        return Completion(ids, logprobs, [self.version] * len(ids), reason)

    async def score(
        self, rid: str, input_ids: TokenIds, *, start: int, top: int = 0, affinity: str = ""
    ) -> PromptScores:
        raise AssertionError("the proxy scores nothing")

    async def abort(self, rid: str) -> None:
        raise AssertionError("the proxy aborts by cancelling")

    async def health(self) -> None:
        return None

    async def model_info(self) -> ModelInfo:
        return ModelInfo("models/policy", self.version, self.renderer.vocab_size, self.max_context)

    async def busy_s(self) -> float | None:
        return None

    async def aclose(self) -> None:
        return None

    def _check(self, input_ids: TokenIds) -> None:
        if len(input_ids) >= self.max_context:
            raise EngineRejected(f"{len(input_ids)} tokens leave no room in a context of {self.max_context}")
        if int(np.max(input_ids)) >= self.renderer.vocab_size:
            raise EngineRejected(f"a token id is outside the vocabulary of {self.renderer.vocab_size}")

    async def _delay(self) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + self.delay_s
        await asyncio.sleep(0)
        while (left_s := end - clock()) > 0 and not self.hurry.is_set():
            await asyncio.sleep(min(left_s, 0.005))

    async def _stream(
        self, completion: Completion, on_tokens: Callable[[TokenChunk], None], interval: int
    ) -> None:
        ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        start = 0
        while start < len(ids):
            end = start + max(self.rng.randrange(1, 4), interval if start else 1)
            on_tokens(TokenChunk(tuple(ids[start:end]), tuple(logprobs[start:end])))
            start = end
            await asyncio.sleep(self.token_delay_s)
