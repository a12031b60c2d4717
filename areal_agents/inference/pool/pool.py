"""A pool of replicas: an episode stays on one replica, and no request is lost with one.

A request whose replica dies, aborts it or answers invalidly continues on another replica, on the exact ids
that were sampled so far; see `continuation.PartialCompletion`. Only a request that kills replicas is given
up; see `suspects`. With two or more replicas every request is streamed from the engine, so that the tokens
sampled before a failure are known, with their versions.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from areal_agents.core.completion import UNSURE, Completion, SamplingParams, TokenChunk, TokenIds
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.continuation import Decode, OldVersion, PartialCompletion, StopString
from areal_agents.inference.engine import Engine, ModelInfo, OnTokens, PromptScores, Sampler
from areal_agents.inference.pool.balancing import Affinities
from areal_agents.inference.pool.external_router import is_routable
from areal_agents.inference.pool.limits import PoolLimits
from areal_agents.inference.pool.monitor import ReplicaMonitor, WithoutTrainer, unavailable
from areal_agents.inference.pool.replica import CurrentVersion, Replica, Unanswered
from areal_agents.inference.pool.sides import is_of_canary
from areal_agents.inference.pool.suspects import (
    Suspect,
    Suspects,
    attempt_rid,
    has_arrived,
    is_invalid_answer,
    pause_after_attempt,
)

_NOTHING_SAMPLED = SamplingParams(1)  # for scoring requests, which only their tokens identify
_MOST_INVALID = 3  # different requests in a row with invalid answers after which a replica is paused


@dataclass(slots=True)
class PoolCounts:
    """Counts of events since the start.

    Attributes:
        failovers: requests that continued after their replica was lost or gave invalid answers.
        continued: requests that continued after their replica aborted them.
        resubmitted_tokens: sampled tokens that were sent again as the end of a prompt.
        catch_ups: replicas that were brought to the current version.
    """

    failovers: int = 0
    continued: int = 0
    resubmitted_tokens: int = 0
    catch_ups: int = 0


class EnginePool:
    """Implements `engine.Sampler` over replicas.

    Args:
        engines: the clients of the replicas, at least one; the pool closes them.
        names: the names of the replicas in messages, such as their URLs; by default their indices.
        current: returns the latest published version, or None before the first. It may block.
        without_trainer: a context manager that yields True if no trainer is running, and prevents one from
            starting inside the block; by default a trainer is assumed to run.
        decode: decodes token ids, to find stop strings that span two attempts.
        vocab_size: the vocabulary size of the model; an engine with another size is refused. None: all
            engines must have that of the first.
        router: the client of a router in front of all replicas. If given, it chooses the replica, and the
            pool only monitors them.
        limits: see PoolLimits.
        canary: the names of the replicas of the canary; () if there is none. They serve the episodes of
            `canary_share`, see `sides`, and the other replicas serve the others, also while a side waits for
            its replicas.
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
        canary: Collection[str] = (),
        canary_share: float = 0.0,
    ) -> None:
        if not engines:
            raise ValueError("a pool needs an engine")
        names = names or [f"engine {index}" for index in range(len(engines))]
        self.replicas = tuple(
            Replica(name, engine, engine, is_canary=name in canary)
            for name, engine in zip(names, engines, strict=True)
        )
        if canary and router is not None:
            raise ValueError("a router chooses replicas, so their episodes cannot have sides; leave one out")
        if len({replica.name for replica in self.replicas}) < len(self.replicas):
            raise ValueError(f"an engine is named twice: {', '.join(names)}")
        self.counts = PoolCounts()
        self._limits = limits or PoolLimits()
        self._decode = decode
        self._router = None if router is None else Replica("the router", engines[0], router, "serving")
        self._streams = len(engines) > 1
        self._affinities = Affinities()
        self._canary_share = canary_share if canary else None
        self._stable = tuple(replica for replica in self.replicas if not replica.is_canary)
        self._canary = tuple(replica for replica in self.replicas if replica.is_canary)
        self._suspects = Suspects(self._limits)
        self._unfinished: dict[str, tuple[PartialCompletion, Replica | None]] = {}
        self._changed = asyncio.Event()
        self._is_closed = False
        self._monitor = ReplicaMonitor(
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
        stream_interval: int = 1,
    ) -> Completion:
        """See Sampler.generate.

        Raises EngineUnavailable if no replica serves within `limits.wait_s`, if the request is interrupted
        repeatedly without a new token, or if it was streamed in part and cannot be continued (grammars and
        penalties). Raises EngineError if it is given up because it kills replicas.
        """
        if on_tokens is None:
            stream_interval = self._limits.unread_interval
        unfinished = PartialCompletion(
            input_ids, sampling, on_tokens, self._decode, stream_interval=stream_interval
        )
        self._unfinished[rid] = unfinished, None
        try:
            return await self._sampled(
                rid, unfinished, self._suspects.suspect_of(input_ids, sampling), affinity
            )
        finally:
            del self._unfinished[rid]

    async def score(
        self, rid: str, input_ids: TokenIds, *, start: int, top: int = 0, affinity: str = ""
    ) -> PromptScores:
        """See Sampler.score. One replica computes all scores; if it is lost, another one does.

        It is always sent to a replica itself, never through a router. Raises EngineUnavailable if no replica
        serves within `limits.wait_s`, or several in a row are lost, and EngineError if the request is given
        up because it kills replicas. `abort` has no effect on it: cancel the call instead.
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
        raise AssertionError("the loop returns or raises")

    async def abort(self, rid: str) -> None:
        """See Sampler.abort."""
        unfinished, replica = self._unfinished.get(rid, (None, None))
        if unfinished is None:
            return
        unfinished.is_aborted = True
        if replica is not None:
            await replica.sampler.abort(unfinished.rid)

    async def health(self) -> None:
        """Raise EngineUnavailable unless a replica serves."""
        await self.model_info()

    async def model_info(self) -> ModelInfo:
        """Return what the replicas serve, with the newest version. Raises EngineUnavailable if none
        serves."""
        if not any(replica.is_serving for replica in self.replicas):
            self.start()
            await asyncio.gather(*(self._monitor.check(replica) for replica in self.replicas))
        serving = [replica for replica in self.replicas if replica.is_serving]
        infos = [(replica.version, replica.info) for replica in serving if replica.info is not None]
        if not infos:
            raise unavailable(self.replicas)
        version, info = max(infos, key=lambda pair: pair[0])
        return replace(info, version=version)

    async def busy_s(self) -> float | None:
        """Return the mean over the replicas; None if a replica does not count."""
        counted = await asyncio.gather(*(replica.engine.busy_s() for replica in self.replicas))
        known = [value for value in counted if value is not None]
        return sum(known) / len(known) if len(known) == len(counted) else None

    def start(self) -> None:
        """Start to monitor the replicas; otherwise the first call starts it."""
        if not self._monitor.is_running and not self._is_closed:
            self._monitor.start()

    async def aclose(self) -> None:
        """Stop monitoring and close the clients; requests that wait for a replica fail."""
        self._is_closed = True
        self._changed.set()
        await self._monitor.stop()
        routed = [self._router] if self._router is not None else []
        await asyncio.gather(*(replica.sampler.aclose() for replica in [*self.replicas, *routed]))

    async def _sampled(
        self, rid: str, unfinished: PartialCompletion, suspect: Suspect, affinity: str
    ) -> Completion:
        stalls, avoid = 0, None
        for attempt in itertools.count():
            before = unfinished.kept
            async with suspect.turn():
                replica = await self._serving(partial(self._route, affinity, unfinished, avoid))
                self._unfinished[rid] = unfinished, replica
                whole, failure = await self._tried(
                    replica, attempt_rid(rid, attempt), unfinished, suspect, affinity
                )
            if whole is not None:
                return whole
            avoid = replica if failure is not None else None
            self.counts.resubmitted_tokens += unfinished.kept
            stalls = await pause_after_attempt(stalls, brought=unfinished.kept - before, cause=failure)
        raise AssertionError("the loop returns or raises")

    async def _tried(
        self, replica: Replica, rid: str, unfinished: PartialCompletion, suspect: Suspect, affinity: str
    ) -> tuple[Completion | None, EngineError | None]:
        """Make one attempt; return the completion if it is finished, and the error that interrupted the
        attempt."""
        began, least = asyncio.get_running_loop().time(), self._least_version(replica)
        try:
            completion = await self._attempt(replica, rid, unfinished, suspect, affinity, least)
            if completion.finish_reason != "abort" or unfinished.is_aborted:
                return unfinished.finished(completion), None
            whole = unfinished.interrupted(completion)
            self.counts.continued += 1
            return whole, None
        except StopString:
            return unfinished.stopped(), None
        except EngineError as error:
            if unfinished.is_aborted or not await self._may_continue(replica, error, suspect, affinity):
                raise
            await self._keep_trusted(replica, unfinished, error, least)
            died = await self._has_died(replica, error, began)
            # The tokens of the next piece may have been sampled.
            reached = unfinished.reached + unfinished.stream_interval - 1
            whole = unfinished.interrupted(None)
            if died and whole is None:
                suspect.died(reached, error)
            self.counts.failovers += 1
            return whole, error

    async def _keep_trusted(
        self, replica: Replica, unfinished: PartialCompletion, error: EngineError, least: int
    ) -> None:
        """Discard the tokens of a failed attempt if the failure or their versions show that they are wrong.

        Raises the EngineError if some of them were already delivered to the caller.
        """
        refuted = error if isinstance(error, OldVersion) or is_invalid_answer(error) else None
        if refuted is None and unfinished.latest != UNSURE:
            try:
                await self._check_versions(replica, [unfinished.latest], least)
            except EngineError as wrong:
                refuted = wrong
        if refuted is None:
            return
        if unfinished.has_delivered and not isinstance(refuted, OldVersion):
            raise refuted
        unfinished.discard()

    async def _attempt(
        self,
        replica: Replica,
        rid: str,
        unfinished: PartialCompletion,
        suspect: Suspect,
        affinity: str,
        least: int,
    ) -> Completion:
        unfinished.begin(rid, least_version=least)
        take = unfinished.take if self._streams or unfinished.streams else None
        interval = unfinished.stream_interval
        if suspect.is_tried:
            interval = 1  # how far it gets tells whether it kills engines

            def take(chunk: TokenChunk) -> None:
                unfinished.take(chunk)
                suspect.reached(unfinished.reached)

        async with replica.attempt():
            completion = await replica.sampler.generate(
                rid,
                unfinished.input_ids,
                unfinished.sampling,
                take,
                affinity=affinity,
                stream_interval=interval,
            )
        await self._check_versions(replica, completion.versions, least)
        if completion.finish_reason != "abort":
            replica.answered()
        return completion

    async def _check_versions(self, replica: Replica, found: npt.ArrayLike, least: int) -> None:
        """Raise EngineError if consecutive tokens have versions that are impossible for this run or
        replica."""
        versions = np.asarray(found)
        if not len(versions):
            return
        if (versions[1:] < versions[:-1]).any():
            raise EngineError(
                f"{replica.name} sampled tokens with decreasing versions: {_runs(versions.tolist())}"
            )
        oldest, newest = int(versions[0]), int(versions[-1])
        if oldest < least:
            raise OldVersion(f"{replica.name} sampled with version {oldest} after version {least}")
        current = replica.goal(self._monitor.current)
        if current is not None and newest > current.version:
            await self._monitor.refresh()
            current = replica.goal(self._monitor.current)
            if current is not None and newest > current.version:
                raise EngineError(
                    f"{replica.name} samples with version {newest}, and {current.version} is the newest that "
                    "was published: it serves another run; restart that engine, or use engines that no other "
                    "run uses"
                )
        if current is None and newest > replica.version and replica is not self._router:
            # Nothing has been published, so the version that the replica reports is the only bound.
            await self._monitor.check_again(replica)
            if newest > replica.version:
                raise EngineError(
                    f"{replica.name} samples with version {newest}, and reports {replica.version}"
                )
        replica.saw(newest)
        if current is not None and newest == current.version:
            replica.may_be_paused = False

    def _least_version(self, replica: Replica) -> int:
        """Return the oldest version allowed in an answer; only a restarted server has a lower one."""
        if replica is not self._router:
            return replica.version
        return min((other.version for other in self.replicas if other.is_serving), default=-1)

    def _route(self, affinity: str, unfinished: PartialCompletion, avoid: Replica | None) -> Replica | None:
        """Return the sampler for a request; None if no replica serves."""
        if self._router is not None and is_routable(unfinished.sampling):
            return self._router if any(replica.is_serving for replica in self.replicas) else None
        return self._place(affinity, newest=unfinished.newest, avoid=avoid)

    def _place(self, affinity: str, *, newest: int = -1, avoid: Replica | None = None) -> Replica | None:
        """Return a replica of the pool that serves, or None; see Affinities.route."""
        if len(self.replicas) == 1:
            return self.replicas[0] if self.replicas[0].is_serving else None
        replicas = self.replicas
        if self._canary_share is not None:
            replicas = self._canary if is_of_canary(affinity, self._canary_share) else self._stable
        return self._affinities.route(replicas, affinity, newest=newest, avoid=avoid)

    async def _serving(self, route: Callable[[], Replica | None]) -> Replica:
        """Wait until `route` returns a replica. Raises EngineUnavailable if none serves in time."""
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
        """Whether a request may be sent again after a failure; updates the state of the replica."""
        if replica is self._router:
            for other in self.replicas:
                other.wake.set()
            return not isinstance(error, EngineRejected)
        if isinstance(error, EngineRejected):  # the request's fault, unless something else serves there now
            await self._monitor.check(replica)
            return not replica.is_serving
        if isinstance(error, EngineUnavailable | OldVersion):
            replica.doubt(str(error))
            return True
        replica.wake.set()
        if replica.is_serving and replica.note_invalid_answer(affinity, suspect.digest) >= _MOST_INVALID:
            replica.exclude_after_invalid_answers(
                self._limits.longest_pause_s, f"it gave invalid answers: {error}"
            )
        return True

    async def _has_died(self, replica: Replica, error: EngineError, began: float) -> bool:
        """Whether the process that ran the request died, as opposed to a stall or a broken connection.

        It died if, after the request was sent at time `began`, its replica was unreachable or had been
        restarted; behind a router, if any replica was. The answer is the same for all requests that the death
        interrupted, also for those that fail after the replica is back.
        """
        if (
            not isinstance(error, EngineUnavailable)
            or isinstance(error, Unanswered)
            or not has_arrived(error)
        ):
            return False
        behind = self.replicas if replica is self._router else (replica,)
        if not any(other.gone_at >= began for other in behind):
            await asyncio.gather(*(self._monitor.check_again(other) for other in behind if not other.misses))
        return any(other.gone_at >= began for other in behind)

    def _count_load(self) -> None:
        self.counts.catch_ups += 1


def _runs(versions: Sequence[int]) -> str:
    """Format versions of consecutive tokens for a message, without repetitions."""
    return ", ".join(str(version) for version, _ in itertools.groupby(versions))
