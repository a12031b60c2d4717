"""Finds the request that ends every engine it is sent to, among those that ran beside it.

The death of an engine does not say which of its requests it died of, so all of them continue elsewhere. One
that has seen several deaths is a suspect: of the suspects of a pool one at a time is sent, until it has come
further than it was when an engine died. An engine that dies before that has died of it, and the request is
given up. Innocents wait for their turn, which is short, and continue.

What a generation that was broken off is called when it is sent again, and when it is given up.

`continuation.Draft` keeps what was sampled of it, and `pool.EnginePool` chooses where it continues.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from areal_agents.core.completion import SamplingParams, TokenIds
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.continuation import OldVersion
from areal_agents.inference.pool.limits import PoolLimits

_UNSEEN = 8  # tokens that a dying engine may have sampled and that did not arrive any more
_REFUSED_S = 600.0  # for so long a request that was given up is refused to all callers


def has_arrived(error: EngineError) -> bool:
    """Whether a request that failed in this way may have run: not if nothing accepted its connection."""
    return not isinstance(error.__cause__, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


class Suspects:
    """The suspects of one pool, and the requests that were given up recently."""

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self.turn = asyncio.Lock()
        self._given_up: dict[bytes, tuple[float, str]] = {}  # until when and why, by what was asked

    def suspect_of(self, input_ids: TokenIds, sampling: SamplingParams) -> Suspect:
        """The suspect of a new request. EngineError if the same was given up a short while ago."""
        suspect = Suspect(self, input_ids, sampling)
        self.refuse_known(suspect)
        return suspect

    def give_up(self, suspect: Suspect, why: str) -> None:
        """Refuse the same from now on: a retry, another attempt at the task, or the others of its group."""
        self._given_up[suspect.asked] = time.monotonic() + _REFUSED_S, why

    def refuse_known(self, suspect: Suspect) -> None:
        """EngineError if the same as in `suspect` was given up a short while ago."""
        now = time.monotonic()
        self._given_up = {asked: known for asked, known in self._given_up.items() if known[0] > now}
        if self._given_up and suspect.asked in self._given_up:
            why = self._given_up[suspect.asked][1]
            raise EngineError(
                f"the same request was given up less than {_REFUSED_S / 60:g} minutes ago: {why}"
            )


class Suspect:
    """What one request has seen.

    Attributes:
        deaths: of engines while it ran there.
        is_tried: it is the one suspect that runs, and has not come further yet than it was at a death.
    """

    def __init__(self, suspects: Suspects, input_ids: TokenIds, sampling: SamplingParams) -> None:
        self._suspects = suspects
        self._request = input_ids, sampling
        self.deaths = 0
        self.is_tried = False
        self._furthest = 0  # tokens that it had when an engine died

    @property
    def asked(self) -> bytes:
        """A digest of what an engine can die of: the prompt and the grammar, not the seed."""
        input_ids, sampling = self._request
        return hashlib.sha256(input_ids.tobytes() + repr(sampling.grammar).encode()).digest()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Send it within: at once, or as a suspect when no other is tried.

        EngineUnavailable if that takes longer than `limits.wait_s`.
        """
        limits = self._suspects.limits
        if self.deaths < limits.suspect_after:
            yield
            return
        try:
            async with asyncio.timeout(limits.wait_s):
                await self._suspects.turn.acquire()
        except TimeoutError:
            raise EngineUnavailable(
                f"{self.deaths} engines died while they ran this request among others; such requests are "
                f"sent one after the other, and its turn did not come within {limits.wait_s:g} s"
            ) from None
        self.is_tried = True
        try:
            self._suspects.refuse_known(self)
            yield
        finally:
            self._end_turn()

    def reached(self, tokens: int) -> None:
        """It has so many tokens now."""
        if self.is_tried and tokens > self._furthest + _UNSEEN:
            self._end_turn()

    def died(self, tokens: int, error: EngineError) -> None:
        """An engine died while it ran there and had so many tokens. EngineError if it is given up."""
        self.deaths += 1
        if self.is_tried or self.deaths >= self._suspects.limits.most_deaths:
            why = f"{self.deaths} engines died while they ran it; the last time: {error}"
            if self.is_tried:
                self._suspects.give_up(self, why)
            raise EngineError(f"the request is not sent again: {why}") from error
        self._furthest = max(self._furthest, tokens)

    def _end_turn(self) -> None:
        if self.is_tried:
            self.is_tried = False
            self._suspects.turn.release()


MOST_STALLS = 5  # attempts in a row that brought no token, after which a completion is given up
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0


def attempt_rid(rid: str, attempt: int) -> str:
    """The name of an attempt: the engine may still know the one before."""
    return f"{rid}~{attempt}" if attempt else rid


def is_invalid_answer(error: Exception | None) -> bool:
    """Whether an attempt failed because of an invalid answer, not because the engine was lost or behind."""
    others = EngineUnavailable | EngineRejected | OldVersion
    return isinstance(error, EngineError) and not isinstance(error, others)


async def pause_after_attempt(stalls: int, *, brought: int, cause: Exception | None = None) -> int:
    """Count an attempt that ended early, and wait before the next one if it brought no token.

    EngineUnavailable after MOST_STALLS of them in a row, or EngineError if the last answer was invalid.
    """
    if brought:
        return 0
    if stalls >= MOST_STALLS:
        why = f"; the last time: {cause}" if cause is not None else ""
        kind = EngineError if is_invalid_answer(cause) else EngineUnavailable
        raise kind(
            f"the generation was broken off {stalls + 1} times in a row without a token{why}"
        ) from cause
    await asyncio.sleep(min(_FIRST_WAIT_S * 2**stalls, _LONGEST_WAIT_S))
    return stalls + 1
