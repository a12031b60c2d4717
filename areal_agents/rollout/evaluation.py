"""Evaluates the policy: plays each held-out task some times. These episodes are never trained on.

A collection plays tasks of training in the same way, without a trainer: its episodes are of split train.

Several rollout processes share an evaluation. Each begins with a part of its own and goes on with what the
others have not begun, or what one of them has left. The id of an episode follows from what it plays, and the
store has each id once, so no two processes play the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import FINGERPRINT, OPENED_BY_RUNNER, RUNNER, Split, Task
from areal_agents.errors import RequestError
from areal_agents.rollout.agents.agent import Agent, WaitsForPlace
from areal_agents.rollout.agents.attempt import (
    Attempt,
    FailureStreak,
    abort_episodes,
    backoff_s,
    open_attempt,
    run_rollout,
)
from areal_agents.rollout.config import LimitsConfig
from areal_agents.rollout.rewarding import RewardFunction
from areal_agents.rollout.seeds import episode_seed
from areal_agents.rollout.worker_share import WorkerShare
from areal_agents.store import Store

logger = logging.getLogger(__name__)

SHARED_POLL_S = 0.5  # between looks whether the other processes have ended their part


async def evaluate_tasks(
    client: AsyncClient,
    store: Store,
    agent: Agent,
    tasks: Sequence[Task],
    *,
    label: str,
    step: int | None,
    temperature: float,
    seed: int,
    concurrency: int,
    limits: LimitsConfig,
    retries: int,
    patience: FailureStreak,
    attempts: int = 1,
    agent_error_reward: float | None = None,
    function: RewardFunction | None = None,
    fingerprint: str = "",
    split: Split = "eval",
    worker: WorkerShare | None = None,
) -> None:
    """Run every task until it has `attempts` scored episodes under this label and step in the store.

    The episodes have metadata {"eval": label, "step": step, "attempt": index}. The seeds of
    sampling depend on `seed`, the task and the index and not on the label, so evaluations differ only by the
    weights. An attempt that still fails after `retries` repetitions stays failed; the last episode of an
    attempt is the one that counts.

    Args:
        fingerprint: a name of what episodes are played with, which is recorded as metadata; episodes with
            another one do not count. "": there is none.
        worker: this process's part, if several share the evaluation. This returns when all of it has ended.

    Raises:
        AgentError: too many attempts in a row failed.
    """
    metadata: dict[str, Any] = {"eval": label, **({} if step is None else {"step": step})}
    if fingerprint:
        metadata[FINGERPRINT] = fingerprint
    every = [(task, index) for index in range(attempts) for task in tasks]
    player = partial(
        AttemptPlayer,
        client=client,
        agent=agent,
        temperature=temperature,
        seed=seed,
        limits=limits,
        patience=patience,
        agent_error_reward=agent_error_reward,
        function=function,
        split=split,
    )
    if worker is None:
        await abort_open(client, store, split=split, label=label)
        played = _played(store, split, metadata)
        waiting = deque(one for one in every if not played[one[0].id, one[1]].is_scored)
        await player(metadata=metadata, retries=retries).play(waiting, concurrency=concurrency)
        return

    own = frozenset((task.id, index) for task, index in every[worker.index :: worker.count])
    while True:
        await abort_open(client, store, split=split, label=label, worker=worker)
        played = _played(store, split, metadata)
        left = [one for one in every if played[one[0].id, one[1]].is_left(retries)]
        if not left:
            return
        free = [one for one in left if not played[one[0].id, one[1]].is_open]
        # Of what others have not begun yet, the last come first, because the others begin with the first.
        chosen = [one for one in free if (one[0].id, one[1]) in own] or free[: -concurrency - 1 : -1]
        if not chosen:
            await asyncio.sleep(SHARED_POLL_S)
            continue
        of_worker = player(metadata={**metadata, RUNNER: worker.name}, retries=0, played=played)
        await of_worker.play(deque(chosen), concurrency=concurrency)


@dataclass(slots=True)
class _Played:
    """What the store has of an attempt at a task, over all its repetitions."""

    is_scored: bool = False
    is_open: bool = False
    failed: int = 0
    episodes: int = 0

    def is_left(self, retries: int) -> bool:
        """Whether an episode runs or should run."""
        return not self.is_scored and (self.is_open or self.failed <= retries)


def _played(store: Store, split: Split, metadata: Mapping[str, Any]) -> dict[tuple[str, int], _Played]:
    """Return what the store has under these metadata, by task id and index of the attempt."""
    found: dict[tuple[str, int], _Played] = defaultdict(_Played)
    for episode in store.episodes(split=split, metadata=metadata):
        of_attempt = found[episode.task_id, episode.metadata.get("attempt", 0)]
        of_attempt.is_scored |= episode.status in ("finished", "truncated")
        of_attempt.is_open |= episode.status == "open"
        of_attempt.failed += episode.status == "failed"
        of_attempt.episodes += 1
    return found


def _episode_id(metadata: Mapping[str, Any], task_id: str, index: int, number: int) -> str:
    """Return the id of the `number`th episode of an attempt in an evaluation."""
    of_evaluation = [metadata["eval"], metadata.get("step"), metadata.get(FINGERPRINT)]
    named = json.dumps([*of_evaluation, task_id, index, number]).encode()
    return f"eval-{hashlib.blake2b(named, digest_size=16).hexdigest()}"


class _PlayedElsewhere(Exception):
    """Another process has opened the episode."""


class _NotBegun(Exception):
    """The agent has not begun; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlayer:
    """Plays attempts at tasks; what is not described here is described in `evaluate_tasks`.

    Attributes:
        metadata: of every episode; "eval" is the label.
        check: called after each episode; what it raises ends the evaluation.
        played: what was played before, by task id and index, if several processes share the evaluation; an
            attempt that another one has begun is then left to it.
    """

    client: AsyncClient
    agent: Agent
    metadata: Mapping[str, Any]
    temperature: float
    seed: int
    limits: LimitsConfig
    retries: int
    patience: FailureStreak
    agent_error_reward: float | None = None
    function: RewardFunction | None = None
    split: Split = "eval"
    check: Callable[[], None] = lambda: None
    played: Mapping[tuple[str, int], _Played] | None = None

    async def play(self, waiting: deque[tuple[Task, int]], *, concurrency: int) -> None:
        """Play attempts, each a task and the index of the attempt, `concurrency` at a time.

        Raises:
            AgentError: too many attempts in a row failed.
        """
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(len(waiting), concurrency, self.agent.capacity or concurrency)):
                workers.create_task(self._play_next(waiting))

    async def _play_next(self, waiting: deque[tuple[Task, int]]) -> None:
        """Play one attempt after another, until none is left."""
        not_begun = 0  # attempts since the last one that began
        while waiting:
            task, index = waiting.popleft()
            tried = 0
            while tried <= self.retries:
                try:
                    error = await self._episode(task, index, tried + 1)
                except _PlayedElsewhere:
                    break
                except _NotBegun as missing:
                    self._warn(task, f"has not begun, and is tried again: {missing}")
                    not_begun += 1
                    await asyncio.sleep(backoff_s(not_begun))
                    if self.played is not None:
                        break  # the caller looks again which attempts are left
                    continue
                tried, not_begun = tried + 1, 0
                self.check()
                self.patience.note(error)
                if error is None:
                    break
                self._warn(task, f"failed: {error}")
                if tried <= self.retries:
                    await asyncio.sleep(backoff_s(tried))

    async def _episode(self, task: Task, index: int, tried: int) -> str | None:
        """Play an episode, the `tried`th of an attempt here, and return why it failed, None if it did not.

        Raises:
            _PlayedElsewhere: another process has opened it.
            _NotBegun: it was aborted before the agent had begun.
        """
        named = None
        if self.played is not None:
            before = self.played[task.id, index]
            tried += before.failed
            named = _episode_id(self.metadata, task.id, index, before.episodes)
            if before.episodes:  # which have failed, or have not begun
                await asyncio.sleep(backoff_s(before.episodes))
        sampling = {
            "temperature": self.temperature,
            "base_seed": episode_seed(self.seed, "eval", task.id, index, tried),
        }
        metadata = {**self.metadata, "attempt": index}
        attempt = Attempt(task, self.split, metadata=metadata, sampling=sampling, id=named)
        try:
            waits = isinstance(self.agent, WaitsForPlace)
            opened = await open_attempt(self.client, attempt, limits=self.limits, waits_for_place=waits)
        except RequestError as error:
            if named is not None and error.status == 409:
                raise _PlayedElsewhere from None
            return str(error)
        try:
            outcome = await run_rollout(
                self.client,
                self.agent,
                task,
                opened,
                limits=self.limits,
                agent_error_reward=self.agent_error_reward,
                function=self.function,
            )
        except RequestError as error:
            return str(error)
        if outcome.status == "aborted":
            raise _NotBegun(outcome.error)
        return outcome.error

    def _warn(self, task: Task, text: str) -> None:
        logger.warning("evaluation %s, task %s %s", self.metadata["eval"], task.id, text)


async def abort_open(
    client: AsyncClient,
    store: Store,
    *,
    split: str | None = None,
    label: str | None = None,
    reason: str = "its runner no longer runs it",
    worker: WorkerShare | None = None,
) -> None:
    """Abort the open episodes of runners, for example those of one that was killed.

    With a `worker`, those of other running processes are not aborted.
    """
    metadata = OPENED_BY_RUNNER if label is None else {**OPENED_BY_RUNNER, "eval": label}
    left = store.episodes(split=split, status="open", metadata=metadata)
    if worker is not None:
        runners = {episode.metadata.get(RUNNER) for episode in left}
        ended = {name for name in runners if worker.has_left(name)}
        left = [episode for episode in left if episode.metadata.get(RUNNER) in ended]
    await abort_episodes(client, [episode.id for episode in left], reason)
