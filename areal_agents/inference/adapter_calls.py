"""Calls to a server whose policy is a LoRA adapter: each names the adapter of the version that is served.

All tokens of such a call are of that version, also if the server swaps meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from areal_agents.core.completion import Completion, TokenChunk
from areal_agents.errors import EngineRejected
from areal_agents.inference.engine import ModelInfo, OnTokens

T = TypeVar("T")


async def with_served_adapter(
    model_info: Callable[[], Awaitable[ModelInfo]], ask: Callable[[int], Awaitable[T]]
) -> T:
    """Call `ask` with the served version, whose adapter the request must name.

    Args:
        model_info: asks the server what it serves.
        ask: sends the request, which names the adapter of the version that it is given.
    """
    # Queried each time: a cached version may be older than the one that must sample the next batch.
    version = (await model_info()).version
    try:
        return await ask(version)
    except EngineRejected:
        # The adapter may be gone because of a newer version or a restart of the server.
        now = (await model_info()).version
        if now == version:
            raise
        return await ask(now)


async def completion_under(
    version: int, on_tokens: OnTokens | None, generate: Callable[[OnTokens | None], Awaitable[Completion]]
) -> Completion:
    """Return the completion of a call that named the adapter of a version, labelled with that version.

    Args:
        on_tokens: called with each chunk, which is labelled too.
        generate: makes the call, and passes chunks to the function that it is given.
    """

    def labelled(chunk: TokenChunk) -> None:
        assert on_tokens is not None
        on_tokens(replace(chunk, versions=(version,) * len(chunk.token_ids)))

    completion = await generate(labelled if on_tokens is not None else None)
    return replace(completion, versions=np.full(len(completion), version, np.int32))
