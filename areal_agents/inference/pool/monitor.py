"""Polls the replicas of a pool, brings them to the current version, and decides which of them serve.

Invariant: a replica is `serving` only while it reports the current version, or while it served when that was
published and the trainer that swaps it in is running. The trainer limits how long a swap may take; a replica
that it left out remains its responsibility until the next version is published. A paused replica answers
health checks, so a swap is never mistaken for a death. For a replica of the canary, the current version is
the candidate, as long as there is one.

Engines do not report whether they are paused. While a trainer runs, only the trainer resumes engines, at the
end of each publication. If no trainer runs or can start meanwhile, a replica that may have been left paused
is resumed from here once it has the current version. One that has it from an object storage is not: its own
process pauses and resumes it, and leaves it paused if its weights differ from those published.

A replica that started late or was restarted loads the current version from the folder in the version's row,
without the trainer. While that folder is still being written the replica waits, and serves nothing; if the
trainer publishes another version meanwhile, the replica gets that one like every other. It also waits for a
version in an object storage, which its own process reads. Several processes may find the same replica:
each checks it again before it loads. The replica is not paused for the load, because resuming it could
interfere with a swap by the trainer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

from areal_agents.errors import ArealAgentsError, EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.engine import Engine, ModelInfo, adapter_name
from areal_agents.inference.pool.agreement import difference_of, other_weights
from areal_agents.inference.pool.limits import PoolLimits
from areal_agents.inference.pool.replica import CurrentVersion, Replica

logger = logging.getLogger(__name__)

WithoutTrainer = Callable[[], AbstractAsyncContextManager[bool]]
_SPREAD_S = 0.3  # random delay, so that not all processes load into a late replica at once


class ReplicaMonitor:
    """Monitors the states of the replicas of one pool.

    Args:
        replicas: all replicas of the pool.
        current: returns the latest published version, called in another thread; None before the first, and
            then replicas serve with any version.
        without_trainer: see EnginePool.
        limits: see PoolLimits.
        on_change: called whenever a state has changed, and after every health check of a replica that serves.
        on_load: called when a replica was brought to the current version.
        vocab_size: the vocabulary size that all must have; None: that of the first replica that answers.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        current: Callable[[], CurrentVersion | None],
        without_trainer: WithoutTrainer,
        limits: PoolLimits,
        on_change: Callable[[], None],
        on_load: Callable[[], None],
        vocab_size: int | None,
    ) -> None:
        self.current: CurrentVersion | None = None
        # the first replica that answered, and the model that all must serve
        self.model: tuple[str, ModelInfo] | None = None
        self._replicas = replicas
        self._read_current = current
        self._without_trainer = without_trainer
        self._limits = limits
        self._on_change = on_change
        self._on_load = on_load
        self._vocab_size = vocab_size
        self._tasks: list[asyncio.Task[None]] = []
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._checks: dict[str, asyncio.Task[None]] = {}

    @property
    def is_running(self) -> bool:
        """Whether `start` was called."""
        return bool(self._tasks)

    def start(self) -> None:
        """Start the health checks; the first ones are running when this returns."""
        self._tasks = [asyncio.create_task(self._keep_checking(replica)) for replica in self._replicas]

    async def stop(self) -> None:
        """Cancel all tasks of the monitor."""
        tasks = [*self._tasks, *self._loads.values(), *self._checks.values()]
        self._tasks, self._loads, self._checks = [], {}, {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def check(self, replica: Replica) -> None:
        """Query what a replica serves, and update its state. Concurrent calls share one query."""
        check = self._checks.get(replica.name)
        if check is None or check.done():
            check = self._checks[replica.name] = asyncio.create_task(self._check(replica))
        await asyncio.shield(check)

    async def check_again(self, replica: Replica) -> None:
        """Check with a new query, since one in progress may already have received an older answer."""
        under_way = self._checks.get(replica.name)
        if under_way is not None and not under_way.done():
            await asyncio.wait([under_way])
        await self.check(replica)

    async def _check(self, replica: Replica) -> None:
        before = replica.state, replica.reason
        try:
            async with asyncio.timeout(self._limits.probe_timeout_s):
                info = await replica.engine.model_info()
        except TimeoutError:
            self._missed(replica, f"it did not answer within {self._limits.probe_timeout_s:g} s")
        except EngineError as error:
            self._missed(replica, str(error))
        else:
            is_read = await self.refresh()
            goal = replica.goal(self.current)
            # A newer version than the known one may be correct: decide only after the store has been read.
            if is_read or goal is None or info.version <= goal.version:
                other_model = await self._other_model(replica, info)
                self._answered(replica, info, other_model, await self._is_swapped(replica, info.version))
                if is_read and goal is None:
                    replica.may_be_paused = False  # nothing has been published, so no trainer has paused it
                await self._resume_left(replica)
        if replica.is_serving or (replica.state, replica.reason) != before:
            # also if a failed call made it doubtful during the check, and requests wait for it
            self._on_change()
        if replica.state != before[0]:
            level = logging.INFO if replica.is_serving else logging.WARNING
            logger.log(level, "engine %s is %s%s", replica.name, replica.state, _because(replica))

    async def refresh(self) -> bool:
        """Read the latest published version; return False, and keep the known one, if that fails."""
        try:
            found = await asyncio.to_thread(self._read_current)
        except ArealAgentsError as error:
            logger.warning("the current version could not be read: %s", error)
            return False
        known, self.current = self.current, found or self.current
        if found is None or found == known:
            return True
        for replica in self._replicas:
            before, goal = replica.goal(known), replica.goal(found)
            is_new = goal is not None and (before is None or goal.version != before.version)
            if goal is not None and is_new and replica.state in ("serving", "doubtful"):
                replica.due = goal.version if replica.due is None else replica.due
        return True

    async def _keep_checking(self, replica: Replica) -> None:
        limits = self._limits
        while True:
            try:
                await self.check(replica)
            except Exception:  # a bug: log it and continue, or the replica would keep its state forever
                logger.exception("the health check of engine %s failed unexpectedly", replica.name)
            pause_s = limits.probe_every_s
            if 0 < replica.misses < limits.lost_after:
                pause_s = min(limits.probe_again_s, pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await replica.wake.wait()
            replica.wake.clear()

    def _missed(self, replica: Replica, why: str) -> None:
        replica.misses += 1
        if replica.misses == 1:
            replica.gone_at = asyncio.get_running_loop().time()
        if replica.misses >= self._limits.lost_after:
            replica.lose(why)
        elif replica.state != "down":
            replica.state, replica.reason = "doubtful", why

    async def _other_model(self, replica: Replica, info: ModelInfo) -> str:
        """Describe how a replica's model differs from the pool's; "" if not. The first replica sets the
        model."""
        if self._vocab_size not in (None, info.vocab_size):
            return f"it serves a vocabulary of {info.vocab_size}, expected {self._vocab_size}"
        if self.model is None:
            self.model = replica.name, info
        if difference := difference_of(self.model, info):
            return difference
        first = next(other for other in self._replicas if other.name == self.model[0])
        if replica.info is not None or replica is first or self.current is not None:
            return ""  # already compared, or it serves only after it has the current version
        return await other_weights(first.engine, self.model, replica.engine, info)

    def _answered(self, replica: Replica, info: ModelInfo, other_model: str, is_swapped: bool) -> None:
        now = asyncio.get_running_loop().time()
        replica.misses = 0
        if other_model:
            replica.state, replica.reason = "refused", other_model
            return
        replica.info = info
        if started_again := info.version < replica.version:
            replica.gone_at = now
        replica.version = info.version
        goal = replica.goal(self.current)
        if goal is None or info.version == goal.version:
            replica.due, replica.load_error = None, ""
            self._admit(replica, now)
        elif started_again or not is_swapped:
            replica.state = "late"
            replica.may_be_paused, replica.due = replica.may_be_paused or replica.due is not None, None
            what = "the candidate" if goal is not self.current else "current"
            replica.reason = f"it serves version {info.version}, and {goal.version} is {what}" + (
                f"; {replica.load_error}" if replica.load_error else ""
            )
            if replica.name not in self._loads:
                self._loads[replica.name] = asyncio.create_task(self._bring_up(replica))
        else:
            self._admit(replica, now)

    def _admit(self, replica: Replica, now: float) -> None:
        if now < replica.excluded_until:
            replica.state, replica.reason = "down", replica.exclusion_reason
        else:
            replica.state, replica.reason = "serving", ""

    async def _is_swapped(self, replica: Replica, version: int) -> bool:
        """Whether the trainer is about to swap the current version into a replica that reports `version`."""
        goal = replica.goal(self.current)
        if goal is None or replica.due is None or version == goal.version:
            return False
        if version >= replica.due:
            replica.due = goal.version
        if replica.due < goal.version:
            return False  # it was left out of an earlier swap
        async with self._without_trainer() as alone:
            return not alone

    async def _resume_left(self, replica: Replica) -> None:
        """Resume a replica that was left paused, if no trainer is running that would resume it."""
        goal = replica.goal(self.current)
        if not (replica.may_be_paused and replica.is_serving and goal and replica.version == goal.version):
            return
        if goal.in_storage:
            return
        async with self._without_trainer() as alone:
            if not alone:
                return
            try:
                async with asyncio.timeout(self._limits.probe_timeout_s):
                    await replica.engine.resume()
            except EngineRejected as error:
                logger.info("engine %s cannot be resumed, so it was not paused: %s", replica.name, error)
            except (EngineError, TimeoutError) as error:
                logger.warning("engine %s may be paused, and could not be resumed: %s", replica.name, error)
                return
        replica.may_be_paused = False

    async def _bring_up(self, replica: Replica) -> None:
        """Repeatedly load the current version until the replica is no longer late."""
        pause_s = self._limits.load_again_s
        try:
            await asyncio.sleep(random.uniform(0, _SPREAD_S))
            while replica.state == "late":
                await self.check(replica)
                goal = replica.goal(self.current)
                if replica.state != "late" or goal is None:
                    return
                if goal.folder_pending or goal.in_storage:
                    why = "read from the object storage" if goal.in_storage else "written"
                    replica.load_error = f"the folder of that version is not {why} yet"
                    await asyncio.sleep(self._limits.load_again_s)
                    continue
                await self._load(replica, goal)
                await self.check(replica)
                if replica.state != "late":
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._limits.longest_pause_s)
        finally:
            self._loads.pop(replica.name, None)

    async def _load(self, replica: Replica, goal: CurrentVersion) -> None:
        logger.info("engine %s: loading version %d from %s", replica.name, goal.version, goal.path)
        try:
            await load(replica.engine, goal)
        except EngineError as error:
            logger.warning("engine %s could not load version %d: %s", replica.name, goal.version, error)
            replica.load_error = f"loading it failed: {error}"
        else:
            self._on_load()


def _because(replica: Replica) -> str:
    return f": {replica.reason}" if replica.reason else ""


def unavailable(replicas: Sequence[Replica], waited_s: float = 0.0) -> EngineUnavailable:
    """Return an error which states that no replica serves, with the reason for each."""
    reasons = "; ".join(f"{r.name} is {r.state}{_because(r)}" for r in replicas)
    waited = f" within {waited_s:g} s" if waited_s else ""
    return EngineUnavailable(f"no engine serves{waited}: {reasons}")


_OTHERS_S = 0.5  # that another process that has loaded an adapter may take to set the version


async def load(engine: Engine, goal: CurrentVersion) -> None:
    """Make an engine serve `goal`. Raises EngineError if that fails."""
    if not (Path(goal.path) / "adapter_config.json").is_file():
        await engine.settle()
        # Another process may have loaded it meanwhile, and its requests may be running.
        if (await engine.model_info()).version != goal.version:
            await engine.update_weights_from_disk(goal.path, goal.version)
        return
    name = adapter_name(goal.version)
    try:
        await engine.load_adapter(name, goal.path)
    except EngineRejected as error:
        await asyncio.sleep(_OTHERS_S)
        if (await engine.model_info()).version == goal.version:
            return  # another process has loaded it, and running requests need the adapter
        # Most likely another process loaded it and died before it set the version.
        logger.info("the adapter %s is loaded again: %s", name, error)
        await engine.unload_adapter(name)
        await engine.load_adapter(name, goal.path)
    await engine.set_version(goal.version, abort_running=False)
