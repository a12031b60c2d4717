"""What a generation that was broken off is called when it is sent again, and when it is given up.

See `draft.Draft` for what is kept of it, and `pool.EnginePool` for where it goes on.
"""

from __future__ import annotations

import asyncio

from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.draft import OldVersion

MOST_STALLS = 5  # attempts in a row that brought no token, after which a completion is given up
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0


def rid_of(rid: str, attempt: int) -> str:
    """The name of an attempt: the engine may still know the one before."""
    return f"{rid}~{attempt}" if attempt else rid


def is_garbage(error: Exception | None) -> bool:
    """Whether an attempt failed because of an invalid answer, not because the engine was lost or behind."""
    others = EngineUnavailable | EngineRejected | OldVersion
    return isinstance(error, EngineError) and not isinstance(error, others)


async def stalled(stalls: int, *, brought: int, cause: Exception | None = None) -> int:
    """Count an attempt that ended early, and wait before the next one if it brought no token.

    EngineUnavailable after MOST_STALLS of them in a row, or EngineError if the last answer was invalid.
    """
    if brought:
        return 0
    if stalls >= MOST_STALLS:
        why = f"; the last time: {cause}" if cause is not None else ""
        kind = EngineError if is_garbage(cause) else EngineUnavailable
        raise kind(
            f"the generation was broken off {stalls + 1} times in a row without a token{why}"
        ) from cause
    await asyncio.sleep(min(_FIRST_WAIT_S * 2**stalls, _LONGEST_WAIT_S))
    return stalls + 1
