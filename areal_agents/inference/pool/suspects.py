"""Finds the request that kills every engine it is sent to, among those that ran beside it.

The death of an engine does not show which of its requests caused it, so all of them continue on other
engines. A request that was running at several deaths is a suspect. Suspects are sent one at a time, until the
request has more tokens than it had when an engine died. If an engine dies before that, the request caused it
and is given up. Other suspects wait briefly for their turn and continue.

This module also names the attempts of an interrupted generation, and decides when it is given up.
`continuation.PartialCompletion` keeps the tokens that were sampled, and `pool.EnginePool` chooses the next
replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from areal_agents.core.completion import SamplingParams, TokenIds
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.continuation import OldVersion
from areal_agents.inference.http_connections import NotConnected
from areal_agents.inference.pool.limits import PoolLimits

_UNSEEN = 8  # tokens that a dying engine may have sampled but not delivered
_REFUSED_S = 600.0  # how long a request that was given up is refused to all callers


def has_arrived(error: EngineError) -> bool:
    """Whether a request that failed with `error` may have run; it did not if it had no connection."""
    return not isinstance(error.__cause__, NotConnected)


class Suspects:
    """The suspects of one pool, and the requests that were given up recently."""

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self.turn = asyncio.Lock()
        # by the digest of the request: until when it is refused, and why
        self._given_up: dict[bytes, tuple[float, str]] = {}

    def suspect_of(self, input_ids: TokenIds, sampling: SamplingParams) -> Suspect:
        """Return the Suspect of a new request. Raises EngineError if an equal request was recently given
        up."""
        suspect = Suspect(self, input_ids, sampling)
        self.refuse_known(suspect)
        return suspect

    def give_up(self, suspect: Suspect, why: str) -> None:
        """Refuse equal requests from now on: retries, other attempts at the task, other episodes of its
        group."""
        self._given_up[suspect.digest] = time.monotonic() + _REFUSED_S, why

    def refuse_known(self, suspect: Suspect) -> None:
        """Raise EngineError if a request equal to that of `suspect` was recently given up."""
        now = time.monotonic()
        self._given_up = {digest: known for digest, known in self._given_up.items() if known[0] > now}
        if self._given_up and suspect.digest in self._given_up:
            why = self._given_up[suspect.digest][1]
            raise EngineError(
                f"the same request was given up less than {_REFUSED_S / 60:g} minutes ago: {why}"
            )


class Suspect:
    """The history of one request.

    Attributes:
        deaths: the number of engines that died while they ran it.
        is_tried: whether it is the one suspect that runs, and does not yet have more tokens than at a death.
    """

    def __init__(self, suspects: Suspects, input_ids: TokenIds, sampling: SamplingParams) -> None:
        self._suspects = suspects
        self._request = input_ids, sampling
        self.deaths = 0
        self.is_tried = False
        self._furthest = 0  # number of tokens that it had when an engine died

    @property
    def digest(self) -> bytes:
        """A digest of the parts that can kill an engine: the prompt and the grammar, not the seed."""
        input_ids, sampling = self._request
        return hashlib.sha256(input_ids.tobytes() + repr(sampling.grammar).encode()).digest()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Send the request inside the with-block, which a suspect enters only when no other is tried.

        Raises EngineUnavailable if that takes longer than `limits.wait_s`.
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
        """Note that the request has `tokens` tokens now."""
        if self.is_tried and tokens > self._furthest + _UNSEEN:
            self._end_turn()

    def died(self, tokens: int, error: EngineError) -> None:
        """Note that an engine died when the request had `tokens` tokens. Raises EngineError if it is given
        up."""
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


MOST_STALLS = 5  # attempts in a row without a new token after which a completion is given up
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0


def attempt_rid(rid: str, attempt: int) -> str:
    """Return the request id of an attempt; it is unique, since an engine may still run the previous
    attempt."""
    return f"{rid}~{attempt}" if attempt else rid


def is_invalid_answer(error: Exception | None) -> bool:
    """Whether an attempt failed because of an invalid answer, not because the engine was lost or outdated."""
    others = EngineUnavailable | EngineRejected | OldVersion
    return isinstance(error, EngineError) and not isinstance(error, others)


async def pause_after_attempt(stalls: int, *, brought: int, cause: Exception | None = None) -> int:
    """Count an attempt that ended early, and wait before the next one if it brought no token.

    Raises EngineUnavailable after MOST_STALLS of them in a row, or EngineError if the last answer was
    invalid.
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
