"""Evaluates the policy: plays each held-out task some times. These episodes are never trained on.

A collection plays tasks of training in the same way, without a trainer: its episodes are of split train.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import FINGERPRINT, OPENED_BY_RUNNER, Split, Task
from areal_agents.errors import RequestError
from areal_agents.rollout.agents.agent import Agent
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
from areal_agents.store import Store

logger = logging.getLogger(__name__)


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
) -> None:
    """Run every task until it has `attempts` scored episodes under this label and step in the store.

    The episodes have metadata {"eval": label, "step": step, "attempt": index}. The seeds of
    sampling depend on `seed`, the task and the index and not on the label, so evaluations differ only by the
    weights. An attempt that still fails after `retries` repetitions stays failed; the last episode of an
    attempt is the one that counts.

    Args:
        fingerprint: a name of what episodes are played with, which is recorded as metadata; episodes with
            another one do not count. "": there is none.

    Raises:
        AgentError: too many attempts in a row failed.
    """
    await abort_open(client, store, split=split, label=label)
    metadata: dict[str, Any] = {"eval": label, **({} if step is None else {"step": step})}
    if fingerprint:
        metadata[FINGERPRINT] = fingerprint
    ended = store.episodes(split=split, metadata=metadata)
    scored = {
        (episode.task_id, episode.metadata.get("attempt", 0))
        for episode in ended
        if episode.status in ("finished", "truncated")
    }
    waiting = deque(
        (task, index) for index in range(attempts) for task in tasks if (task.id, index) not in scored
    )

    await play_attempts(
        client,
        agent,
        waiting,
        metadata=metadata,
        temperature=temperature,
        seed=seed,
        concurrency=concurrency,
        limits=limits,
        retries=retries,
        patience=patience,
        agent_error_reward=agent_error_reward,
        function=function,
        split=split,
    )


async def play_attempts(
    client: AsyncClient,
    agent: Agent,
    waiting: deque[tuple[Task, int]],
    *,
    metadata: Mapping[str, Any],
    temperature: float,
    seed: int,
    concurrency: int,
    limits: LimitsConfig,
    retries: int,
    patience: FailureStreak,
    agent_error_reward: float | None = None,
    function: RewardFunction | None = None,
    split: Split = "eval",
    check: Callable[[], None] = lambda: None,
) -> None:
    """Play attempts, each a task and the index of the attempt; arguments as in `evaluate_tasks`.

    Args:
        check: called after each episode; what it raises ends the evaluation.

    Raises:
        AgentError: too many attempts in a row failed.
    """

    async def attempt(task: Task, index: int, tried: int) -> str | None:
        sampling = {
            "temperature": temperature,
            "base_seed": episode_seed(seed, "eval", task.id, index, tried),
        }
        of_attempt = Attempt(task, split, metadata={**metadata, "attempt": index}, sampling=sampling)
        try:
            opened = await open_attempt(client, of_attempt, limits=limits)
            outcome = await run_rollout(
                client,
                agent,
                task,
                opened,
                limits=limits,
                agent_error_reward=agent_error_reward,
                function=function,
            )
            return outcome.error
        except RequestError as error:
            return str(error)

    async def work() -> None:
        while waiting:
            task, index = waiting.popleft()
            for tried in range(1, retries + 2):
                error = await attempt(task, index, tried)
                check()
                patience.note(error)
                if error is None:
                    break
                logger.warning("evaluation %s, task %s failed: %s", metadata["eval"], task.id, error)
                if tried <= retries:
                    await asyncio.sleep(backoff_s(tried))

    async with asyncio.TaskGroup() as workers:
        for _ in range(min(len(waiting), concurrency, agent.capacity or concurrency)):
            workers.create_task(work())


async def abort_open(
    client: AsyncClient,
    store: Store,
    *,
    split: str | None = None,
    label: str | None = None,
    reason: str = "its runner no longer runs it",
) -> None:
    """Abort the open episodes of runners, for example those of one that was killed."""
    metadata = OPENED_BY_RUNNER if label is None else {**OPENED_BY_RUNNER, "eval": label}
    left = store.episodes(split=split, status="open", metadata=metadata)
    await abort_episodes(client, [episode.id for episode in left], reason)
