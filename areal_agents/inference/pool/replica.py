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

# new: has not answered yet; serving: gets requests; doubtful: a call failed, and a health check is due; late:
# does not have the current version; down: does not answer, or answers invalidly; refused: serves another
# model.
State = Literal["new", "serving", "doubtful", "late", "down", "refused"]


class Unanswered(EngineUnavailable):
    """A replica was lost because it did not answer health checks: it may be slow or unreachable."""


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    """The latest published version, and the folder of its weights or adapter.

    `folder_pending`: the folder is not complete yet, so that a replica without the version waits for it, or
    for the trainer, which may send it the next version directly. `in_storage`: each engine's process
    reads the version from an object storage and has its engine load it. `candidate`: the version that the
    replicas of the canary serve instead; None: they serve this one, too.
    """

    version: int
    path: str
    folder_pending: bool = False
    in_storage: bool = False
    candidate: CurrentVersion | None = None


@dataclass(slots=True, eq=False)
class Replica:
    """The state of one replica in its pool.

    Attributes:
        name: its URL.
        engine: the client of the replica.
        sampler: the client for completions: `engine`, or for a router the client of the router.
        state: see State.
        reason: why it is not serving, for messages.
        info: the model info of the last health check; None before the first.
        version: the newest version observed since it was last started; -1 if none.
        running: the number of running requests from this pool.
        episodes: the number of episodes assigned to it.
        misses: the number of consecutive unanswered health checks.
        gone_at: when a health check last found that it had disappeared or been restarted, by the event loop's
            clock.
        invalid_answers: (caller, request) of the invalid answers since the last valid one; no caller and no
            request is in it twice.
        exclusions: how often in a row it was excluded because of invalid answers.
        excluded_until: the end of the current exclusion, by the event loop's clock.
        exclusion_reason: the reason for the current or last exclusion.
        due: the version that the trainer is expected to swap in, because the replica served when it was
        published; None if none.
        may_be_paused: whether a trainer that has ended may have left it paused: it was already running when
            it was found, or its swap was not finished, and it has sampled nothing with the current version
            since.
        load_error: why the last attempt to bring it to the current version failed.
        is_canary: whether it serves the candidate, if there is one, and the episodes of the canary only.
        wake: set to request a health check now.
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
    exclusions: int = 0
    excluded_until: float = 0.0
    exclusion_reason: str = ""
    due: int | None = None
    may_be_paused: bool = True
    load_error: str = ""
    is_canary: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _attempts: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def is_serving(self) -> bool:
        """Whether it gets requests."""
        return self.state == "serving"

    @property
    def is_healthy(self) -> bool:
        """Whether it answered the last health check."""
        return self.state in ("serving", "late", "refused")

    def goal(self, current: CurrentVersion | None) -> CurrentVersion | None:
        """Return the version that it must serve; None before the first."""
        if current is not None and self.is_canary and current.candidate is not None:
            return current.candidate
        return current

    def saw(self, version: int) -> None:
        """Note that a token or a health check showed that it serves `version`."""
        self.version = max(self.version, version)

    def doubt(self, why: str) -> None:
        """Note that a call failed: it gets no requests until the next health check."""
        if self.state == "serving":
            self.state, self.reason = "doubtful", why
        self.wake.set()

    def answered(self) -> None:
        """Note a valid answer."""
        self.invalid_answers.clear()
        self.exclusions = 0

    def note_invalid_answer(self, caller: str, digest: bytes) -> int:
        """Note an invalid answer to the request with this digest by `caller`, "" if the caller is not known.

        Returns how many different requests of different callers got one since its last valid answer. A
        request that always gets one is counted once, and so is a caller with many such requests.
        """
        known = any(digest == other or (caller and caller == who) for who, other in self.invalid_answers)
        if not known:
            self.invalid_answers.append((caller, digest))
        return len(self.invalid_answers)

    def exclude_after_invalid_answers(self, longest_s: float, why: str) -> None:
        """Send it no requests for 1 s, doubled for each exclusion in a row, at most `longest_s`.

        Health checks continue. It is excluded again only after the same number of different requests with
        invalid answers.
        """
        self.excluded_until = asyncio.get_running_loop().time() + min(2.0**self.exclusions, longest_s)
        self.state = "down"
        self.reason = self.exclusion_reason = why
        self.invalid_answers.clear()
        self.exclusions += 1

    def lose(self, why: str) -> None:
        """Mark it as lost, and interrupt the requests that run on it."""
        self.state, self.reason, self.info, self.version, self.due = "down", why, None, -1, None
        now = asyncio.get_running_loop().time()
        for attempt in self._attempts:
            attempt.reschedule(now)
        self._attempts.clear()  # cancel once only: a second cancellation would interrupt the cleanup

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """Run a request on the replica within a with-block; raises Unanswered if the replica is lost
        meanwhile."""
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
