"""Runs training groups: as many as the gate allows, oldest first, with `concurrency` episodes at a time.

Every submitted group is completed or dropped; the surplus episodes of an over-sampled group are aborted as
soon as it is complete. No state here needs to survive a restart: started groups, their attempts and their
failures are read from the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import FINGERPRINT, RUNNER, training_group_id
from areal_agents.errors import RequestError
from areal_agents.rollout.agents.agent import Agent, WaitsForPlace
from areal_agents.rollout.agents.attempt import Attempt, FailureStreak, Outcome, open_attempt, run_rollout
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.control_calls import ControlCalls
from areal_agents.rollout.data import TaskMixture, TaskSource
from areal_agents.rollout.groups.group import GroupRun
from areal_agents.rollout.groups.in_progress import GroupsInProgress
from areal_agents.rollout.groups.reconciling import Reconciler
from areal_agents.rollout.groups.settling import SlotSettler
from areal_agents.rollout.groups.submission import Submission, newest_step
from areal_agents.rollout.rewarding import RewardFunction
from areal_agents.rollout.seeds import episode_seed
from areal_agents.rollout.worker_share import WorkerShare
from areal_agents.store import Store


class Collector:
    """Runs training episodes until cancelled.

    Args:
        steps: the number of steps of the run, from which the number of groups follows.
        seed: the seed of the run, from which every attempt gets one of its own.
        shortage: returns what the run is short of, or None; no group is submitted during a shortage.
        changed: an event that is set whenever the store may have changed, and periodically.
        function: the reward function, if rewards are not given by the agent.
        patience: counts failures in a row, also of evaluations; ends the run when there are too many.
        fingerprint: a name of what episodes are played with, which is recorded as metadata. Groups that were
            begun with something else are dropped, because their episodes cannot be compared. "": no name.
        worker: this process's part, if several processes collect for the run.
    """

    def __init__(
        self,
        *,
        client: AsyncClient,
        store: Store,
        agent: Agent,
        source: TaskSource | TaskMixture,
        config: RolloutConfig,
        steps: int,
        seed: int = 0,
        shortage: Callable[[], str | None] = lambda: None,
        changed: asyncio.Event,
        patience: FailureStreak,
        function: RewardFunction | None = None,
        fingerprint: str = "",
        worker: WorkerShare | None = None,
    ) -> None:
        self._client = client
        self._store = store
        self._agent = agent
        self._config = config
        self._seed = seed
        self._changed = changed
        self._patience = patience
        self._function = function
        self._metadata = {FINGERPRINT: fingerprint} if fingerprint else {}
        self._worker = worker
        if worker is not None:
            self._metadata[RUNNER] = worker.name
        self._capacity = min(config.concurrency, agent.capacity or config.concurrency)
        self._submission = Submission(
            store=store,
            source=source,
            config=config,
            steps=steps,
            shortage=shortage,
            is_shared=worker is not None,
        )
        self._groups = groups = GroupsInProgress(size=config.group_size, changed=changed)
        self._calls = calls = ControlCalls(client, patience)
        self._settler = SlotSettler(groups=groups, calls=calls, store=store, config=config, function=function)
        self._reconciler = Reconciler(
            groups=groups,
            settler=self._settler,
            calls=calls,
            patience=patience,
            store=store,
            config=config,
            fingerprint=fingerprint,
            worker=worker,
        )

    async def run(self) -> None:
        """Collect until cancelled.

        Raises (in an exception group):
            AgentError: too many attempts in a row failed.
            DataError: the data ended before the trainer had enough.
            RequestError: the proxy refused a request or cannot be reached.
        """
        await self._reconciler.resume()
        async with asyncio.TaskGroup() as members:
            while True:
                self._changed.clear()
                await self._reconciler.look_for_changes()
                while self._groups.running < self._capacity and await self._may_fill():
                    group, index = self._groups.take()
                    task = members.create_task(self._fill(group, index), name=f"{group.id}[{index}]")
                    self._groups.note_running(group, index, task)
                if self._groups.is_idle:
                    self._submission.check_data()
                await self._changed.wait()

    async def _may_fill(self) -> bool:
        """Whether an episode may start, in a new group if necessary. The newest groups are held back."""
        if self._groups.first_vacant is None and not await self._submit():
            return False
        return self._groups.first_vacant not in self._submission.held_back()

    async def _submit(self) -> bool:
        """Submit one more group if that is allowed; return whether it was."""
        surplus = self._config.over_sample
        while (chosen := self._submission.next(unregistered=self._groups.unregistered)) is not None:
            group_id = training_group_id(chosen[0].id, chosen[1])
            order = None
            if self._worker is not None:
                at_most, at_step = self._submission.bound()
                admission = await self._calls.begin(
                    group_id,
                    chosen[0],
                    group_size=self._config.group_size,
                    surplus=surplus,
                    runner=self._worker.name,
                    at_most=at_most,
                    at_step=at_step,
                )
                if admission["state"] == "taken":
                    continue
                if admission["state"] == "full":
                    self._submission.put_back(chosen)
                    return False
                order = admission["seq"]
            group = self._groups.begin(group_id, chosen[0], surplus=surplus, order=order)
            group.registered = order is not None
            for index in range(group.slots):
                self._groups.put(group, index)
            return True
        return False

    async def _fill(self, group: GroupRun, index: int) -> None:
        """Make one attempt at an index of a group, and act on its outcome."""
        lost: str | None = None
        try:
            outcome = await self._attempt(group, index)
        except RequestError as error:
            lost = str(error)
        finally:
            self._groups.note_ended(group, index)
        if lost is not None:
            await self._reconciler.look_again(group, index, lost)
            return
        if outcome.status != "aborted":  # a full cluster says nothing about the agent
            self._patience.note(outcome.error)
        await self._settler.settle(group, index, outcome)

    async def _attempt(self, group: GroupRun, index: int) -> Outcome:
        limits = self._config.limits_at(newest_step(self._store))
        seed = episode_seed(self._seed, group.id, index, group.failures[index])
        sampling = {"base_seed": seed}
        attempt = Attempt(
            group.task,
            "train",
            group.id,
            group.size,
            index,
            group.surplus or None,
            metadata=self._metadata,
            sampling=sampling,
        )
        waits = isinstance(self._agent, WaitsForPlace)
        opened = await open_attempt(self._client, attempt, limits=limits, waits_for_place=waits)
        group.registered = True
        group.open[index] = opened.id
        function = self._function
        must_reward = function is None and self._agent.must_reward and not self._config.outside_rewards
        return await run_rollout(
            self._client,
            self._agent,
            group.task,
            opened,
            limits=limits,
            must_reward=must_reward,
            agent_error_reward=self._config.reward_of_agent_errors,
            function=None if function is None or function.of_groups else function,
        )
