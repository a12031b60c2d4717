"""One replica of a pool: the version that it serves, its state, and the requests that run on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from areal_agents.errors import EngineUnavailable
from areal_agents.inference.engine import Engine, ModelInfo, Sampler

# new: has not answered yet; serving: gets requests; doubtful: a call failed and is checked; late: has another
# version than the current; down: does not answer, or answers invalidly; refused: serves another model.
State = Literal["new", "serving", "doubtful", "late", "down", "refused"]


class Unanswered(EngineUnavailable):
    """A replica was lost because looks at it were not answered: it may be slow, or cut off."""


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    """The version that was published last, and the folder of its weights or its adapter."""

    version: int
    path: str


@dataclass(slots=True, eq=False)
class Replica:
    """A replica as its pool knows it.

    Attributes:
        name: its URL.
        engine: its client.
        sampler: what completions of it come from, the same client; of a router, the router's.
        state: see State.
        reason: why it is not serving, for people.
        info: what it served at the last look; None before the first.
        version: the newest version that it was seen to serve since it was last started; -1 if none.
        running: requests of this pool that it has.
        episodes: affinities that it has.
        misses: looks in a row that it did not answer.
        gone_at: when a look last found it gone that was there before, or started again; by the event loop's
            clock.
        invalid_answers: (caller, request) of the invalid answers since the last valid one; no caller and no
            request is in it twice.
        rests: how often in a row it was rested for invalid answers.
        rests_until: it gets no completions to sample before, by the event loop's clock.
        rests_for: why it rests, or rested the last time.
        due: the version that the trainer is to swap in, since it served when that was published; None if
        none.
        may_be_paused: a trainer that is gone may have left it so. It was met as it is, or its swap was not
            finished, and it has sampled nothing of the current version since.
        trouble: why it could not be brought to the current version the last time.
        wake: set to have it looked at now.
    """

    name: str
    engine: Engine
    sampler: Sampler
    state: State = "new"
    reason: str = "it has not answered yet"
    info: ModelInfo | None = None
    version: int = -1
    running: int = 0
    episodes: int = 0
    misses: int = 0
    gone_at: float = -inf
    invalid_answers: list[tuple[str, bytes]] = field(default_factory=list)
    rests: int = 0
    rests_until: float = 0.0
    rests_for: str = ""
    due: int | None = None
    may_be_paused: bool = True
    trouble: str = ""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _attempts: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def is_serving(self) -> bool:
        """Whether it gets requests."""
        return self.state == "serving"

    @property
    def is_healthy(self) -> bool:
        """Whether it answered when it was last looked at."""
        return self.state in ("serving", "late", "refused")

    def saw(self, version: int) -> None:
        """A token or a look tells that it serves `version`."""
        self.version = max(self.version, version)

    def doubt(self, why: str) -> None:
        """A call failed: no more requests until it has been looked at."""
        if self.state == "serving":
            self.state, self.reason = "doubtful", why
        self.wake.set()

    def answered(self) -> None:
        """It gave a valid answer."""
        self.invalid_answers.clear()
        self.rests = 0

    def note_invalid_answer(self, caller: str, asked: bytes) -> int:
        """It gave an invalid answer to the request `asked` of `caller`, "" if the caller is not known.

        Returns how many different requests of different callers got one since its last valid answer. A
        request that always gets one is counted once, and so is a caller with many such requests.
        """
        known = any(asked == other or (caller and caller == who) for who, other in self.invalid_answers)
        if not known:
            self.invalid_answers.append((caller, asked))
        return len(self.invalid_answers)

    def rest_after_invalid_answers(self, longest_s: float, why: str) -> None:
        """Send it no requests for 1 s, doubled for each rest in a row, at most `longest_s`.

        Health checks continue. It rests again only after as many different requests with invalid answers as
        before.
        """
        self.rests_until = asyncio.get_running_loop().time() + min(2.0**self.rests, longest_s)
        self.state = "down"
        self.reason = self.rests_for = why
        self.invalid_answers.clear()
        self.rests += 1

    def lose(self, why: str) -> None:
        """It is gone: whatever waits for it waits no longer."""
        self.state, self.reason, self.info, self.version, self.due = "down", why, None, -1, None
        now = asyncio.get_running_loop().time()
        for attempt in self._attempts:
            attempt.reschedule(now)
        self._attempts.clear()  # once is enough, and more is an error while one unwinds

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """Have a request there; Unanswered if the replica is lost meanwhile."""
        self.running += 1
        try:
            async with asyncio.timeout(None) as attempt:
                self._attempts.add(attempt)
                try:
                    yield
                finally:
                    self._attempts.discard(attempt)
        except TimeoutError:
            raise Unanswered(f"{self.name} was lost: {self.reason}") from None
        finally:
            self.running -= 1
