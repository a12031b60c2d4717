"""What an engine breaks off is sent again: the pause mode `abort` without a loss, on one engine.

See `draft.Draft` for what is kept, and `pool.EnginePool` for several engines.
"""

from __future__ import annotations

import asyncio
import itertools

from areal_agents.core.completion import Completion, SamplingParams, TokenIds
from areal_agents.errors import EngineUnavailable
from areal_agents.inference.draft import Decode, Draft, StopString
from areal_agents.inference.engine import ModelInfo, OnTokens, Sampler

MOST_STALLS = 5  # attempts in a row that brought no token, after which a completion is given up
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0


class Resubmitting:
    """An engine whose generations go on when it aborts them, as the pause mode `abort` does.

    What the caller aborts or cancels stays ended. Everything else is the engine's own.
    """

    def __init__(self, engine: Sampler, *, decode: Decode | None = None) -> None:
        self._engine = engine
        self._decode = decode
        self._drafts: dict[str, Draft] = {}

    async def generate(
        self,
        rid: str,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Completion:
        """See Sampler.generate. EngineUnavailable if the engine aborts again and again without a token."""
        draft = self._drafts[rid] = Draft(input_ids, sampling, on_tokens, self._decode)
        try:
            stalls = 0
            for attempt in itertools.count():
                draft.begin(rid_of(rid, attempt))
                take = draft.take if draft.streams else None
                try:
                    completion = await self._engine.generate(
                        draft.rid, draft.input_ids, draft.sampling, take, affinity=affinity
                    )
                except StopString:
                    return draft.stopped()
                if completion.finish_reason != "abort" or draft.is_aborted:
                    return draft.finished(completion)
                before = draft.kept
                if (whole := draft.broken_off(completion)) is not None:
                    return whole
                stalls = await stalled(stalls, brought=draft.kept - before)
            raise AssertionError("an endless loop has ended")
        finally:
            del self._drafts[rid]

    async def abort(self, rid: str) -> None:
        """See Sampler.abort."""
        draft = self._drafts.get(rid)
        if draft is not None:
            draft.is_aborted = True
        await self._engine.abort(rid if draft is None else draft.rid)

    async def health(self) -> None:
        """See Sampler.health."""
        await self._engine.health()

    async def model_info(self) -> ModelInfo:
        """See Sampler.model_info."""
        return await self._engine.model_info()

    async def busy_s(self) -> float | None:
        """See Sampler.busy_s."""
        return await self._engine.busy_s()

    async def aclose(self) -> None:
        """See Sampler.aclose."""
        await self._engine.aclose()


def rid_of(rid: str, attempt: int) -> str:
    """The name of an attempt: the engine may still know the one before."""
    return f"{rid}~{attempt}" if attempt else rid


async def stalled(stalls: int, *, brought: int, cause: Exception | None = None) -> int:
    """Count an attempt that ended early, and wait before the next one if it brought no token.

    EngineUnavailable after MOST_STALLS of them in a row.
    """
    if brought:
        return 0
    if stalls >= MOST_STALLS:
        why = f"; the last time: {cause}" if cause is not None else ""
        raise EngineUnavailable(
            f"the generation was broken off {stalls + 1} times in a row without a token{why}"
        ) from cause
    await asyncio.sleep(min(_FIRST_WAIT_S * 2**stalls, _LONGEST_WAIT_S))
    return stalls + 1
