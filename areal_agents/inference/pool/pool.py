"""A pool of replicas: an episode stays on one replica, and no request is lost with one.

A request whose replica dies, aborts it or answers invalidly continues elsewhere, on the exact ids that were
sampled so far; see `draft.Draft`. Only one that replicas die of is given up; see `suspects`. With two
replicas or more every request is streamed from the engine, so that what it had sampled when it died is
known, token by token with its version.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from areal_agents.core.completion import UNSURE, Completion, SamplingParams, TokenChunk, TokenIds
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.continuation import Decode, Draft, OldVersion, StopString
from areal_agents.inference.engine import Engine, ModelInfo, OnTokens, PromptScores, Sampler
from areal_agents.inference.pool.balancing import Affinities
from areal_agents.inference.pool.external_router import is_routable
from areal_agents.inference.pool.limits import PoolLimits
from areal_agents.inference.pool.replica import CurrentVersion, Replica, Unanswered
from areal_agents.inference.pool.suspects import (
    Suspect,
    Suspects,
    attempt_rid,
    has_arrived,
    is_invalid_answer,
    pause_after_attempt,
)
from areal_agents.inference.pool.watching import ReplicaMonitor, WithoutTrainer, unavailable

_NOTHING_SAMPLED = SamplingParams(1)  # identifies a scoring request: its tokens alone
_MOST_INVALID = 3  # different requests in a row with invalid answers, after which a replica rests


@dataclass(slots=True)
class PoolCounts:
    """What happened since the start.

    Attributes:
        failovers: requests that went on after their replica had been lost, or had given invalid answers.
        continued: requests that went on after their replica had aborted them.
        resubmitted_tokens: sampled tokens that were sent back as the end of a prompt.
        catch_ups: replicas that were brought to the current version.
    """

    failovers: int = 0
    continued: int = 0
    resubmitted_tokens: int = 0
    catch_ups: int = 0


class EnginePool:
    """Implements `engine.Sampler` over replicas.

    Args:
        engines: their clients, at least one; the pool closes them.
        names: their URLs, for people; by default their order.
        current: reads the version that was published last; None before the first. May block.
        without_trainer: gives True where no running trainer swaps versions into the replicas, and then
            none begins until it is left; by default one may live.
        decode: the text of ids, for stop strings over the seam of two attempts.
        vocab_size: of the model; an engine of another is refused. None: the first engine's is all engines'.
        router: a client that reaches all replicas through a router of their own: it chooses then, and the
            pool only watches them.
        limits: see PoolLimits.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        names: Sequence[str] = (),
        current: Callable[[], CurrentVersion | None] = lambda: None,
        without_trainer: WithoutTrainer = lambda: nullcontext(False),
        decode: Decode | None = None,
        router: Sampler | None = None,
        vocab_size: int | None = None,
        limits: PoolLimits | None = None,
    ) -> None:
        if not engines:
            raise ValueError("a pool needs an engine")
        names = names or [f"engine {index}" for index in range(len(engines))]
        self.replicas = tuple(
            Replica(name, engine, engine) for name, engine in zip(names, engines, strict=True)
        )
        if len({replica.name for replica in self.replicas}) < len(self.replicas):
            raise ValueError(f"an engine is named twice: {', '.join(names)}")
        self.counts = PoolCounts()
        self._limits = limits or PoolLimits()
        self._decode = decode
        self._router = None if router is None else Replica("the router", engines[0], router, "serving")
        self._streams = len(engines) > 1
        self._affinities = Affinities()
        self._suspects = Suspects(self._limits)
        self._drafts: dict[str, tuple[Draft, Replica | None]] = {}
        self._changed = asyncio.Event()
        self._is_closed = False
        self._watch = ReplicaMonitor(
            self.replicas,
            current=current,
            without_trainer=without_trainer,
            limits=self._limits,
            on_change=self._changed.set,
            on_load=self._count_load,
            vocab_size=vocab_size,
        )

    async def generate(
        self,
        rid: str,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Completion:
        """See Sampler.generate.

        EngineUnavailable if no replica serves for `limits.wait_s`, if the request is broken off again and
        again without a token, or if it was streamed in part and cannot continue (grammars and penalties).
        EngineError if it is given up because replicas die of it.
        """
        draft = Draft(input_ids, sampling, on_tokens, self._decode)
        self._drafts[rid] = draft, None
        try:
            return await self._sampled(rid, draft, self._suspects.suspect_of(input_ids, sampling), affinity)
        finally:
            del self._drafts[rid]

    async def score(
        self, rid: str, input_ids: TokenIds, *, start: int, top: int = 0, affinity: str = ""
    ) -> PromptScores:
        """See Sampler.score. One replica computes all of it, and another one does if it is lost.

        It is always sent to a replica itself, never through a router. EngineUnavailable if no replica serves
        for `limits.wait_s`, or several in a row are lost; EngineError if it is given up because replicas die
        of it. `abort` does not know it: cancel the call.
        """
        suspect = self._suspects.suspect_of(input_ids, _NOTHING_SAMPLED)
        stalls, avoid = 0, None
        for attempt in itertools.count():
            async with suspect.turn():
                replica = await self._serving(partial(self._place, affinity, avoid=avoid))
                began = asyncio.get_running_loop().time()
                least = self._least_version(replica)
                try:
                    async with replica.attempt():
                        scores = await replica.engine.score(
                            attempt_rid(rid, attempt), input_ids, start=start, top=top, affinity=affinity
                        )
                    await self._check_versions(replica, [scores.version], least)
                    replica.answered()
                    return scores
                except EngineError as error:
                    if not await self._may_continue(replica, error, suspect, affinity):
                        raise
                    if await self._has_died(replica, error, began):
                        suspect.died(0, error)
                    self.counts.failovers += 1
                    failure = error
            avoid = replica
            stalls = await pause_after_attempt(stalls, brought=0, cause=failure)
        raise AssertionError("an endless loop has ended")

    async def abort(self, rid: str) -> None:
        """See Sampler.abort."""
        draft, replica = self._drafts.get(rid, (None, None))
        if draft is None:
            return
        draft.is_aborted = True
        if replica is not None:
            await replica.sampler.abort(draft.rid)

    async def health(self) -> None:
        """EngineUnavailable unless a replica serves."""
        await self.model_info()

    async def model_info(self) -> ModelInfo:
        """What the replicas serve, with the newest version; EngineUnavailable unless one serves."""
        if not any(replica.is_serving for replica in self.replicas):
            self.start()
            await asyncio.gather(*(self._watch.look(replica) for replica in self.replicas))
        serving = [replica for replica in self.replicas if replica.is_serving]
        infos = [(replica.version, replica.info) for replica in serving if replica.info is not None]
        if not infos:
            raise unavailable(self.replicas)
        version, info = max(infos, key=lambda pair: pair[0])
        return replace(info, version=version)

    async def busy_s(self) -> float | None:
        """The mean over the replicas; None where one does not count."""
        counted = await asyncio.gather(*(replica.engine.busy_s() for replica in self.replicas))
        known = [value for value in counted if value is not None]
        return sum(known) / len(known) if len(known) == len(counted) else None

    def start(self) -> None:
        """Begin to watch the replicas; otherwise the first call does."""
        if not self._watch.is_running and not self._is_closed:
            self._watch.start()

    async def aclose(self) -> None:
        """Stop watching, and close the clients; requests that wait for a replica fail."""
        self._is_closed = True
        self._changed.set()
        await self._watch.stop()
        routed = [self._router] if self._router is not None else []
        await asyncio.gather(*(replica.sampler.aclose() for replica in [*self.replicas, *routed]))

    async def _sampled(self, rid: str, draft: Draft, suspect: Suspect, affinity: str) -> Completion:
        stalls, avoid = 0, None
        for attempt in itertools.count():
            before = draft.kept
            async with suspect.turn():
                replica = await self._serving(partial(self._route, affinity, draft, avoid))
                self._drafts[rid] = draft, replica
                whole, failure = await self._tried(
                    replica, attempt_rid(rid, attempt), draft, suspect, affinity
                )
            if whole is not None:
                return whole
            avoid = replica if failure is not None else None
            self.counts.resubmitted_tokens += draft.kept
            stalls = await pause_after_attempt(stalls, brought=draft.kept - before, cause=failure)
        raise AssertionError("an endless loop has ended")

    async def _tried(
        self, replica: Replica, rid: str, draft: Draft, suspect: Suspect, affinity: str
    ) -> tuple[Completion | None, EngineError | None]:
        """One attempt: the completion if that was all of it, and the error that broke the attempt off."""
        began, least = asyncio.get_running_loop().time(), self._least_version(replica)
        try:
            completion = await self._attempt(replica, rid, draft, suspect, affinity, least)
            if completion.finish_reason != "abort" or draft.is_aborted:
                return draft.finished(completion), None
            whole = draft.broken_off(completion)
            self.counts.continued += 1
            return whole, None
        except StopString:
            return draft.stopped(), None
        except EngineError as error:
            if draft.is_aborted or not await self._may_continue(replica, error, suspect, affinity):
                raise
            await self._keep_trusted(replica, draft, error, least)
            died, reached = await self._has_died(replica, error, began), draft.reached
            whole = draft.broken_off(None)
            if died and whole is None:
                suspect.died(reached, error)
            self.counts.failovers += 1
            return whole, error

    async def _keep_trusted(self, replica: Replica, draft: Draft, error: EngineError, least: int) -> None:
        """Discard what a failed attempt streamed, if the failure or its versions show that it is wrong.

        Raises the EngineError if some of them were already given to the caller.
        """
        refuted = error if isinstance(error, OldVersion) or is_invalid_answer(error) else None
        if refuted is None and draft.latest != UNSURE:
            try:
                await self._check_versions(replica, [draft.latest], least)
            except EngineError as wrong:
                refuted = wrong
        if refuted is None:
            return
        if draft.is_handed and not isinstance(refuted, OldVersion):
            raise refuted
        draft.discard()

    async def _attempt(
        self, replica: Replica, rid: str, draft: Draft, suspect: Suspect, affinity: str, least: int
    ) -> Completion:
        draft.begin(rid, least_version=least)
        take = draft.take if self._streams or draft.streams else None
        if suspect.is_tried:

            def take(chunk: TokenChunk) -> None:
                draft.take(chunk)
                suspect.reached(draft.reached)

        async with replica.attempt():
            completion = await replica.sampler.generate(
                rid, draft.input_ids, draft.sampling, take, affinity=affinity
            )
        await self._check_versions(replica, completion.versions.tolist(), least)
        if completion.finish_reason != "abort":
            replica.answered()
        return completion

    async def _check_versions(self, replica: Replica, versions: Sequence[int], least: int) -> None:
        """EngineError for versions of consecutive tokens that this run, or this replica, cannot have."""
        if not versions:
            return
        if any(later < earlier for earlier, later in itertools.pairwise(versions)):
            raise EngineError(f"{replica.name} sampled with versions that go back: {_runs(versions)}")
        oldest, newest = versions[0], versions[-1]
        if oldest < least:
            raise OldVersion(f"{replica.name} sampled with version {oldest} after version {least}")
        current = self._watch.current
        if current is not None and newest > current.version:
            await self._watch.refresh()
            current = self._watch.current
            if current is not None and newest > current.version:
                raise EngineError(
                    f"{replica.name} samples with version {newest}, and {current.version} is the newest that "
                    "was published: it serves another run"
                )
        if current is None and newest > replica.version and replica is not self._router:
            # Nothing was published, so the version that it reports is the only limit.
            await self._watch.look_anew(replica)
            if newest > replica.version:
                raise EngineError(
                    f"{replica.name} samples with version {newest}, and reports {replica.version}"
                )
        replica.saw(newest)
        if current is not None and newest == current.version:
            replica.may_be_paused = False

    def _least_version(self, replica: Replica) -> int:
        """The oldest version that a request may be answered with: a lower one is of a server just started."""
        if replica is not self._router:
            return replica.version
        return min((other.version for other in self.replicas if other.is_serving), default=-1)

    def _route(self, affinity: str, draft: Draft, avoid: Replica | None) -> Replica | None:
        """A replica that serves, None without any."""
        if self._router is not None and is_routable(draft.sampling):
            return self._router if any(replica.is_serving for replica in self.replicas) else None
        return self._place(affinity, newest=draft.newest, avoid=avoid)

    def _place(self, affinity: str, *, newest: int = -1, avoid: Replica | None = None) -> Replica | None:
        """A replica of the pool itself that serves, None without any; see Affinities.route."""
        if len(self.replicas) == 1:
            return self.replicas[0] if self.replicas[0].is_serving else None
        return self._affinities.route(self.replicas, affinity, newest=newest, avoid=avoid)

    async def _serving(self, route: Callable[[], Replica | None]) -> Replica:
        """What `route` finds, as soon as it finds one; EngineUnavailable if no replica serves in time."""
        if (replica := route()) is not None:
            return replica
        self.start()
        try:
            async with asyncio.timeout(self._limits.wait_s):
                while True:
                    self._changed.clear()
                    if (replica := route()) is not None:
                        return replica
                    if self._is_closed:
                        raise unavailable(self.replicas)
                    await self._changed.wait()
        except TimeoutError:
            raise unavailable(self.replicas, self._limits.wait_s) from None

    async def _may_continue(
        self, replica: Replica, error: EngineError, suspect: Suspect, affinity: str
    ) -> bool:
        """Whether a request may be sent again after a failure; notes what that says about the replica."""
        if replica is self._router:
            for other in self.replicas:
                other.wake.set()
            return not isinstance(error, EngineRejected)
        if isinstance(error, EngineRejected):  # the request's fault, unless something else serves there now
            await self._watch.look(replica)
            return not replica.is_serving
        if isinstance(error, EngineUnavailable | OldVersion):
            replica.doubt(str(error))
            return True
        replica.wake.set()
        if replica.is_serving and replica.note_invalid_answer(affinity, suspect.asked) >= _MOST_INVALID:
            replica.rest_after_invalid_answers(
                self._limits.longest_pause_s, f"it gave invalid answers: {error}"
            )
        return True

    async def _has_died(self, replica: Replica, error: EngineError, began: float) -> bool:
        """Whether a failure was the end of the process that ran the request, not a stall or a broken line.

        It is, if since the request was sent, at `began`, nobody could be reached there, or one that was
        started again. Behind a router that holds if it does for any of the replicas. All requests that a
        death ends are told the same, also those that hear of it when the replica is there again.
        """
        if (
            not isinstance(error, EngineUnavailable)
            or isinstance(error, Unanswered)
            or not has_arrived(error)
        ):
            return False
        behind = self.replicas if replica is self._router else (replica,)
        if not any(other.gone_at >= began for other in behind):
            await asyncio.gather(*(self._watch.look_anew(other) for other in behind if not other.misses))
        return any(other.gone_at >= began for other in behind)

    def _count_load(self) -> None:
        self.counts.catch_ups += 1


def _runs(versions: Sequence[int]) -> str:
    """Versions of consecutive tokens for a message, without repetitions."""
    return ", ".join(str(version) for version, _ in itertools.groupby(versions))
