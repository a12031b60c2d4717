"""The loop in one thread, driven by a random schedule, with the real store, gate, collector and batches.

Only the outer parts are simulated: the proxy's HTTP (control calls go directly to the store, and sometimes
their responses are lost), the agents (the schedule decides when each samples, ends, fails, or waits for its
reward), and the computation of training. The schedule advances in `DrivenStore.wait`, where the trainer would
sleep; if nothing can happen there, the loop is deadlocked.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.client import OpenedEpisode
from areal_agents.core.completion import Completion, SamplingParams, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward, Task
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.episodes.control_forms import (
    describe,
    final_rewards_of,
    new_episode,
    new_group,
)
from areal_agents.rollout.agents.attempt import FailureStreak
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.data import TaskSource
from areal_agents.rollout.evaluation import abort_open
from areal_agents.rollout.groups.collector import Collector
from areal_agents.rollout.worker_share import WorkerShare
from areal_agents.store import Conflict, NoTurn, Store
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.leasing import Batch, next_batch
from areal_agents.training.batches.source import wait_until_whole

LIMITS = SampleLimits(microbatch_tokens=64, vocab_size=96)
NEVER_S = 1e6


class Died(Exception):
    """The trainer was killed."""


class DrivenStore(Store):
    """A store whose `wait` makes a change happen instead of waiting for one."""

    world: World

    def wait(self, cursor: int, timeout_s: float) -> int:
        """Advance the schedule."""
        self.world.wake()  # the collector sees what the trainer has dropped
        self.world.check_capacity()
        assert self.world.advance(deadly=True), f"deadlock: {self.world.describe()}"
        return self.cursor()

    def lease_group_ids(self, count: int, *, step: int) -> list[str]:
        """Lease groups, and check that they are the oldest complete ones."""
        complete = [group.id for group in self.waiting_groups() if group.state == "complete"]
        ids = super().lease_group_ids(count, step=step)
        assert ids == (complete[:count] if len(complete) >= count else [])
        return ids


@dataclass(frozen=True)
class Setting:
    """The settings for which a schedule is generated."""

    rollout: RolloutConfig
    refill_equal_groups: bool = False
    swap_between_batches: bool = False
    deaths: int = 2
    changes: bool = True  # of groups and max_staleness, when the run is resumed
    workers: int = 1  # rollout processes


@dataclass(eq=False)
class Run:
    """An episode that an agent plays; `began` is the version at which its current generation began.

    bad: every attempt fails; long: it samples more tokens than a micro-batch holds; slow: others go first.
    """

    id: str
    bad: bool
    long: bool
    slow: bool
    began: int
    end: asyncio.Future[float | None]
    turns: int = 0


class Network:
    """The control calls of a collector to the store. A call may be lost before or after it takes effect."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.store

    async def open_episode(self, task: Mapping[str, Any], **fields: Any) -> OpenedEpisode:
        await self._travel()
        begun = len(self._store.task_ids_started())
        body = {"task": task, **{name: value for name, value in fields.items() if value is not None}}
        row = self._do(self._store.open_episode, new_episode(body, secrets.token_hex(8), 1))
        if len(self._store.task_ids_started()) > begun:
            self._world.check_gate()
        await self._travel()
        return OpenedEpisode(row.id, "key", "http://nowhere/v1")

    async def finish(
        self, episode: str, *, truncated: bool, rewards: Sequence[Any], require_turn: bool
    ) -> dict[str, Any]:
        status = "truncated" if truncated else "finished"
        given = final_rewards_of({"rewards": list(rewards)})
        return await self._seal(episode, status, given=given, require_turn=require_turn)

    async def fail(self, episode: str, error: str, *, aborted: bool = False) -> dict[str, Any]:
        return await self._seal(episode, "aborted" if aborted else "failed", error=error)

    async def get_episode(self, episode: str) -> dict[str, Any]:
        row = self._store.episode_row(episode)
        return describe(row, self._store.load_episode(episode), with_tokens=False)

    async def drop_group(self, group: str, reason: str) -> None:
        self._do(self._store.drop_open_group, group, reason)

    async def begin_group(self, group: str, task: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        await self._travel()
        begun = len(self._store.task_ids_started())
        admission = self._do(self._store.begin_group, new_group({"id": group, "task": task, **fields}))
        if len(self._store.task_ids_started()) > begun:
            self._world.check_gate()
        await self._travel()
        return asdict(admission)

    async def claim_group(self, group: str, *, expected: str | None, runner: str | None) -> bool:
        await self._travel()
        claimed = self._do(self._store.claim_group, group, expected, runner)
        await self._travel()
        return bool(claimed)

    async def _seal(self, episode: str, status: str, **how: Any) -> dict[str, Any]:
        await self._travel()
        state = self._do(self._store.seal, episode, status, **how)
        await self._travel()
        return asdict(state)

    def _do(self, call: Any, *arguments: Any, **how: Any) -> Any:
        self._world.calls += 1
        try:
            return call(*arguments, **how).result()
        except NoTurn as refused:
            raise RequestError(str(refused), status=409, code="no_turn") from None
        except Conflict as refused:
            raise RequestError(str(refused), status=409) from None

    async def _travel(self) -> None:
        await asyncio.sleep(0)
        if self._world.random.random() < self._world.losses:
            raise RequestError("lost", status=503, code="unreachable")


@dataclass(eq=False)
class Process:
    """A rollout process; `name` is None if it is the only one."""

    index: int
    name: str | None
    changed: asyncio.Event
    collecting: asyncio.Task[None]


class Agents:
    """Agents that wait until the schedule ends their episodes."""

    capacity = None
    must_reward = False

    def __init__(self, world: World) -> None:
        self._world = world

    async def run(self, task: Mapping[str, Any], ep: Any) -> float | None:
        end = asyncio.get_running_loop().create_future()
        slow = self._world.random.random() < 0.25
        run = Run(ep.id, bool(task.get("bad")), bool(task.get("long")), slow, self._world.engine, end)
        self._world.running.append(run)
        try:
            return await end
        finally:
            self._world.running.remove(run)

    async def close(self) -> None: ...


@dataclass
class World:
    """A run whose trainer is simulated by `train`."""

    folder: Path
    setting: Setting
    random: Random
    losses: float = 0.03
    store: DrivenStore = field(init=False)
    engine: int = 0  # the version that the engine serves
    step: int = 0
    version: int = 0
    saved_step: int = 0
    steps: int = 0
    deaths: int = 0
    unchanged: bool = True  # the bound and the batch size have not changed
    step_of: dict[int, int] = field(default_factory=dict)  # version: step
    calls: int = 0
    running: list[Run] = field(default_factory=list)
    unrewarded: list[str] = field(default_factory=list)
    trained: dict[str, int] = field(default_factory=dict)  # group: step
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rollout = self.setting.rollout
        self.algorithm = AlgorithmConfig(refill_equal_groups=self.setting.refill_equal_groups)
        self.tasks = TaskSource(
            tuple(Task(f"t{i}", {"bad": i == 5, "long": i == 4}) for i in range(6)), seed=1
        )
        self.store = DrivenStore.open(self.folder / "store.db")  # type: ignore[assignment]
        self.store.world = self
        self.loop = asyncio.new_event_loop()
        self.processes: dict[int, Process] = {}  # the running processes, by index
        self.alive: set[str | None] = set()  # the names of the processes that others consider alive
        self.begun = 0

    def close(self) -> None:
        """Kill the collectors, and close the loop and the store."""
        self.kill_collectors()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        self.store.close()

    # -- the trainer --------------------------------------------------------------------------

    def train(self, steps: int) -> None:
        """Train this many steps, with as many restarts of the trainer as it takes."""
        self.steps = steps
        self.resume()
        while self.step < steps:
            try:
                self._one_step()
            except Died:
                self.kill_collectors()  # the supervisor ends them with the trainer
                self.resume()
            else:
                self._maybe_change()

    def resume(self) -> None:
        """Start a process of the trainer, as `_Trainer._begin` does."""
        self.step = self.saved_step
        self.store.return_leases(self.step)
        self.trained = {group: step for group, step in self.trained.items() if step <= self.step}
        self.version = self.store.max_version() + 1
        self._publish(self.version, self.step)
        self.engine = self.version
        for index in range(self.setting.workers):
            if index not in self.processes:
                self.start_collector(index)

    def _one_step(self) -> None:
        rollout, step = self.rollout, self.step + 1
        batch = next_batch(
            self.store, self.algorithm, groups=rollout.groups, step=step, version=self.version,
            max_staleness=rollout.max_staleness, on_stale=rollout.on_stale, limits=LIMITS, timeout_s=NEVER_S,
            stop=threading.Event(),
        )  # fmt: skip
        assert batch is not None
        self.check_batch(batch)
        self._meanwhile()
        if self.setting.swap_between_batches and step < self.steps:
            wait_until_whole(
                self.store, groups=rollout.groups, data_ended=lambda: False, timeout_s=NEVER_S,
                stop=threading.Event(),
            )  # fmt: skip
            assert not self.running, self.describe()
        self._publish(self.version + 1, step)
        if not self.setting.swap_between_batches:
            self._meanwhile()
        self.engine = self.version + 1
        self._meanwhile()
        self.store.mark_trained(batch.group_ids, step=step, version=self.version + 1)
        self.trained |= dict.fromkeys(batch.group_ids, step)
        self.batches.append(batch)
        self.step, self.version = step, self.version + 1
        self.wake()
        if self.random.random() < 0.6:
            self.store.commit_checkpoint(step)
            self.saved_step = step

    def _publish(self, version: int, step: int) -> None:
        self.store.publish_version(version, step=step, path="nowhere")
        self.step_of[version] = step

    def _meanwhile(self) -> None:
        for _ in range(self.random.randrange(8)):
            self.advance(deadly=True)

    def _maybe_change(self) -> None:
        if not self.setting.changes or self.random.random() > 0.2:
            return
        groups, bound = self.random.randint(1, 3), self.random.choice([0, 1, 2])
        if self.setting.swap_between_batches:
            bound = 1
        self.kill_collectors()
        self.rollout = self.rollout.model_copy(update={"groups": groups, "max_staleness": bound})
        self.unchanged = False
        self.saved_step = self.step  # a run that is stopped writes a checkpoint
        self.resume()

    # -- the rollout processes and agents -----------------------------------------------------

    def start_collector(self, index: int) -> None:
        """Start a rollout process."""
        network: Any = Network(self)
        changed = asyncio.Event()
        worker = None
        if self.setting.workers > 1:
            self.begun += 1
            name = f"rollout-{index}-{self.begun}"
            worker = WorkerShare(index, self.setting.workers, name, lambda runner: runner in self.alive)
        losses, self.losses = self.losses, 0.0
        self.loop.run_until_complete(abort_open(network, self.store, worker=worker))
        self.losses = losses
        collector = Collector(
            client=network, store=self.store, agent=Agents(self), source=self.tasks, config=self.rollout,
            steps=self.steps, changed=changed, patience=FailureStreak(10**6, least_s=0.0), worker=worker,
        )  # fmt: skip
        name_ = worker.name if worker is not None else None
        self.processes[index] = Process(index, name_, changed, self.loop.create_task(collector.run()))
        self.alive.add(name_)
        self.wake()

    def kill_collector(self, index: int) -> None:
        """Kill a rollout process, which leaves its episodes open."""
        process = self.processes.pop(index)
        self.alive.discard(process.name)
        process.collecting.cancel()
        with suppress(asyncio.CancelledError):
            self.loop.run_until_complete(process.collecting)

    def kill_collectors(self) -> None:
        """Kill all rollout processes."""
        for index in list(self.processes):
            self.kill_collector(index)

    def _kill_or_suspect_one(self) -> None:
        """Kill a rollout process, which may be restarted only later; or have the others consider it dead."""
        index = self.random.choice(list(self.processes))
        name = self.processes[index].name
        chance = self.random.random()
        if self.setting.workers > 1 and chance < 0.3:
            self.alive ^= {name}
            return
        self.kill_collector(index)
        if not self.processes or chance < 0.6:
            self.start_collector(index)

    def wake(self) -> None:
        """Notify the collectors of a change, and run them until all of them wait."""
        for process in self.processes.values():
            process.changed.set()
        self.loop.run_until_complete(self._settle())
        for process in self.processes.values():
            if process.collecting.done():
                process.collecting.result()

    async def _settle(self) -> None:
        """Return when no coroutine has anything left to do but wait for the schedule."""
        await asyncio.sleep(0)
        while self.loop._ready:  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    def advance(self, *, deadly: bool = False) -> bool:
        """Make one event happen; return whether there was one."""
        chance = self.random.random()
        if deadly and self.deaths < self.setting.deaths and chance < 0.02:
            self.deaths += 1
            raise Died
        if chance < 0.05:
            self._kill_or_suspect_one()
            self.wake()
            return True
        missing = [index for index in range(self.setting.workers) if index not in self.processes]
        if missing and chance < 0.15:
            self.start_collector(missing[0])
            return True
        if self.unrewarded and (chance < 0.3 or not self.running):
            self._reward_late()
        elif self.running:
            fast = [run for run in self.running if not run.slow]
            self._play(self.random.choice(fast if fast and self.random.random() < 0.9 else self.running))
        else:
            return False
        self.wake()
        return True

    def _play(self, run: Run) -> None:
        chance = self.random.random()
        if not run.turns:
            if chance < 0.05:
                run.end.set_exception(RuntimeError("it could not begin"))
            else:
                self._turn(run)
        elif run.bad or chance < 0.1:
            run.end.set_exception(RuntimeError("a tool is down"))
        elif chance < 0.35:
            self._turn(run)
        elif chance < 0.45:
            self.store.mark_limit(run.id, "max_turns").result()
            run.end.set_exception(RuntimeError("refused"))
        elif chance < 0.55:
            self.unrewarded.append(run.id)
            run.end.set_result(None)
        else:
            run.end.set_result(float(self.random.random() < 0.5))

    def _turn(self, run: Run) -> None:
        """Add a turn whose generation continued across every weight swap since it began."""
        versions = [*range(run.began, self.engine + 1), self.engine]
        versions += [self.engine] * (LIMITS.microbatch_tokens * run.long)  # too long to be trained on
        count = len(versions)
        turn = Turn(
            id=f"{run.id}-{run.turns}",
            parent=None,
            new_messages=(Message("user", run.id),),
            new_prompt_ids=as_token_ids([2, 3]),
            completion=Completion(
                as_token_ids([7] * count),
                np.full(count, -1.0, np.float32),
                np.array(versions, np.int32),
                "stop",
            ),
            reply=Message("assistant", "-"),
            sampling=SamplingParams(max_new_tokens=count),
        )
        try:
            self.store.add_turn(run.id, turn).result()
        except Conflict:  # another process considered the agent's process dead, and aborted the episode
            assert self.setting.workers > 1
            run.end.set_exception(RuntimeError("refused"))
            return
        run.turns += 1
        run.began = self.engine

    def _reward_late(self) -> None:
        if self.random.random() < 0.3:
            self.store.fail_unrewarded(self.unrewarded).result()
            self.unrewarded.clear()
            return
        episode = self.unrewarded.pop(0)
        with suppress(Conflict):  # it was aborted meanwhile, or has failed
            value = float(self.random.random() < 0.5)
            self.store.set_rewards(episode, [Reward("episode", "", "late", value)]).result()

    # -- invariants ---------------------------------------------------------------------------

    def describe(self) -> str:
        """Describe the state of the run for an error message."""
        return f"step {self.step}, version {self.version}, {self.store.group_counts()}, {self.rollout}"

    def in_flight(self) -> int:
        """Groups submitted and not yet trained."""
        counts = self.store.group_counts()
        return counts["pending"] + counts["complete"] + counts["leased"]

    def check_gate(self) -> None:
        """Check the bound of the gate after a group was begun."""
        if self.rollout.max_staleness is not None:
            assert self.in_flight() <= (self.rollout.max_staleness + 1) * self.rollout.groups, self.describe()

    def check_capacity(self) -> None:
        """Check, while the trainer waits, that the collector has submitted all that the gate allows."""
        if self.rollout.max_staleness is None:
            bound = (self.steps - self.step) * self.rollout.groups
        else:
            bound = (self.rollout.max_staleness + 1) * self.rollout.groups
        assert self.in_flight() >= bound, self.describe()

    def check_batch(self, batch: Batch) -> None:
        """Check that every trained token is within the bound, and that each group is trained once."""
        rollout = self.rollout
        assert len(set(batch.group_ids)) == rollout.groups and not set(batch.group_ids) & set(self.trained)
        for group_id in batch.group_ids:
            assert len(self.store.load_groups([group_id])[0].rollouts) == rollout.group_size
        ages = [self.version - s.versions[s.loss_mask] for s in batch.samples]
        trained = np.concatenate([*ages, np.zeros(0, np.int32)])
        assert (trained >= 0).all()
        if rollout.max_staleness is not None:
            assert (trained <= rollout.max_staleness).all()
        assert sorted(trained) == sorted(batch.staleness.staleness)
        if rollout.on_stale == "drop":
            assert batch.staleness.masked_tokens == 0
        if rollout.max_staleness is not None:
            assert Counter(batch.staleness.staleness.tolist()) <= self._ages(batch.group_ids)
        if self.unchanged and (rollout.on_stale == "wait" or self.setting.swap_between_batches):
            assert (batch.staleness.masked_tokens, batch.stale_groups) == (0, 0)

    def _ages(self, group_ids: Sequence[str]) -> Counter[int]:
        """Count the tokens of the groups by their age in steps, as recorded by this world."""
        rollouts = [rollout for id in group_ids for rollout in self.store.load_groups([id])[0].rollouts]
        turns = [turn for rollout in rollouts for turn in rollout.episode.turns]
        versions = [version for turn in turns for version in turn.completion.versions.tolist()]
        return Counter(abs(self.step - self.step_of[version]) for version in versions)


def setting_of(**changes: Any) -> Setting:
    """Return a setting; names that are not its own fields are fields of its rollout configuration."""
    known = set(Setting.__dataclass_fields__)
    own = {name: value for name, value in changes.items() if name in known}
    rest = {name: value for name, value in changes.items() if name not in known}
    rollout = RolloutConfig(**{"groups": 2, "group_size": 2, "concurrency": 500, "retries": 1, **rest})
    return replace(Setting(rollout), **own)
