"""Runs one episode from opening to sealing, and turns an agent's exceptions into failed episodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from areal_agents.client import AsyncClient, OpenedEpisode
from areal_agents.core.reward_values import checked_reward
from areal_agents.core.rollout import AGENT_ERROR, OPENED_BY_RUNNER, Split, Task
from areal_agents.episode import Episode, ForkPoint
from areal_agents.errors import AgentError, AgentLost, AgentNotStarted, RequestError, RewardError
from areal_agents.rollout.agents.agent import Agent, LeavesFiles, WaitsForPlace
from areal_agents.rollout.config import LimitsConfig
from areal_agents.rollout.rewarding import RewardFunction, finished_episode
from areal_agents.user_functions import describe

logger = logging.getLogger(__name__)

OPENING_GRACE_S = 5.0
_SHOWN_REWARDS = 4
LONGEST_ERROR = 2000  # characters kept of an agent's error
# Exceptions of httpx, and of the OpenAI and Anthropic clients, that say nothing about the model's output.
_CONNECTION_ERRORS = frozenset(
    {
        "APIConnectionError", "APITimeoutError", "ConnectError", "ConnectTimeout", "ConnectionError",
        "ConnectionRefusedError", "ConnectionResetError", "InternalServerError", "PoolTimeout", "ReadError",
        "ReadTimeout", "RemoteProtocolError", "WriteError", "WriteTimeout",
    }
)  # fmt: skip
_FIRST_PROMPT = (
    "the agent's first prompt exceeds the limits of the episode; raise rollout.limits or the first of "
    "rollout.context_stages"
)
_BEYOND_CONTEXT = (
    "the agent's first prompt does not fit the context of the model; shorten the prompt or the descriptions "
    "of the tools, or serve the model with a longer context (engine.max_context)"
)
_NO_REWARD = (
    "the agent gave no reward: return a number, call ep.reward(...) before it ends, or name a reward "
    "function apart from the agent (reward: file.py:function)"
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The task of an episode, and how the episode is opened.

    Attributes:
        group, group_size, surplus, index: the episode's position in its group; None outside groups.
        metadata: stored with the episode.
        sampling: replaces the sampling parameters that the agent requests.
        id: the id of the episode, which only one process can open; None: the proxy chooses one.
    """

    task: Task
    split: Split
    group: str | None = None
    group_size: int | None = None
    index: int | None = None
    surplus: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        status: the status of the episode; "failed" attempts may be repeated. "aborted": there was no room for
            the agent in time, so the attempt has not begun; it is repeated, and counts for nothing.
        rewarded: whether the episode has a reward; one may still be posted over HTTP.
        error: why the attempt failed or has not begun; None otherwise.
        is_unrewarded: whether it failed because the agent gave no reward.
        both_rewarded: what the agent and the reward function gave, and what counts; "" unless both gave
            rewards.
    """

    status: Literal["finished", "truncated", "failed", "aborted"]
    rewarded: bool
    error: str | None = None
    is_unrewarded: bool = False
    both_rewarded: str = ""


async def open_attempt(
    client: AsyncClient, attempt: Attempt, *, limits: LimitsConfig, waits_for_place: bool = False
) -> OpenedEpisode:
    """Open the episode of an attempt. Raises RequestError if the proxy refuses or cannot be reached.

    A cancellation waits for the proxy's answer, so that a caller that then aborts open episodes finds this
    one.

    Args:
        waits_for_place: whether the agent may have to wait until a machine has room for it. `run_rollout`
            then holds the time limit alone: the proxy would count from now on.
    """
    opening = asyncio.create_task(
        client.open_episode(
            {"id": attempt.task.id, "input": dict(attempt.task.input)},
            id=attempt.id,
            group=attempt.group,
            group_size=attempt.group_size,
            surplus=attempt.surplus,
            index=attempt.index,
            split=attempt.split,
            metadata={**OPENED_BY_RUNNER, **attempt.metadata},
            limits=limits.model_dump(exclude_none=True, exclude={"time_s"} if waits_for_place else None),
            sampling=attempt.sampling,
        )
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.wait({opening}, timeout=OPENING_GRACE_S)
        if not opening.cancel():
            opening.exception()  # retrieved, so that asyncio does not log it: no caller waits for it
        raise


async def run_rollout(
    client: AsyncClient,
    agent: Agent,
    task: Task,
    opened: OpenedEpisode,
    *,
    limits: LimitsConfig,
    must_reward: bool = False,
    agent_error_reward: float | None = None,
    function: RewardFunction | None = None,
    fork: ForkPoint | None = None,
) -> Outcome:
    """Run the agent in an open episode, report its rewards, and seal the episode.

    The episode fails if the agent raises, returns an invalid reward, makes no model call, or gives no reward
    although it `must_reward`. It is truncated, and keeps the rewards that were given, if the agent exceeded
    its time limit or another limit of the episode. It is aborted if the agent has not begun.
    Cancelling this ends the agent and leaves the episode open; the caller aborts it.

    Args:
        agent_error_reward: the reward, named AGENT_ERROR, of an episode whose agent raised after it had
            received a reply; the episode is then truncated instead of failed. None: it fails.
        function: a reward function that is called when the agent has ended; if it fails, so does the episode.
        fork: where the episode leaves a recorded one, for the agent to know.

    Raises:
        RequestError: the proxy could not be reached, so the state of the episode is unknown.
    """
    try:
        return await _run(
            client, agent, task, opened, limits, must_reward, agent_error_reward, function, fork
        )
    finally:
        if isinstance(agent, LeavesFiles | WaitsForPlace):
            await asyncio.shield(agent.release(opened.id))


async def _run(
    client: AsyncClient,
    agent: Agent,
    task: Task,
    opened: OpenedEpisode,
    limits: LimitsConfig,
    must_reward: bool,
    agent_error_reward: float | None,
    function: RewardFunction | None,
    fork: ForkPoint | None,
) -> Outcome:
    reports: list[tuple[str, dict[str, Any]]] = []

    def report(path: str, body: dict[str, Any]) -> None:
        reports.append((path, body))

    ep = Episode(opened.id, opened.base_url, opened.api_key, report, fork)
    limit = asyncio.timeout(limits.time_s)
    error: str | None = None
    is_lost = False
    try:
        if isinstance(agent, WaitsForPlace):
            await agent.prepare(task.input, ep, limits.time_s)
        async with limit:
            value = await agent.run(task.input, ep)
        if value is not None:
            ep.report("reward", {"reward": checked_reward(value), "name": "return"})
    except AgentNotStarted as waited:
        await client.fail(opened.id, str(waited)[:LONGEST_ERROR], aborted=True)
        return Outcome("aborted", rewarded=False, error=str(waited)[:LONGEST_ERROR])
    except Exception as raised:
        if not limit.expired():
            error = str(raised) if isinstance(raised, AgentError) else describe(raised)
            is_lost = isinstance(raised, AgentLost)
    given_up = [body["error"] for path, body in reports if path == "fail"]
    if given_up:
        return await _fail(client, opened, given_up[0])
    rewards = [body for path, body in reports if path == "reward"]
    if error is not None:
        state = await client.get_episode(opened.id)
        if state["limit_reached"] is None:
            of_agent = bool(state["turns"]) and not is_lost and not _concerns_the_connection(error)
            if agent_error_reward is None or not of_agent:
                return await _fail(client, opened, error)
            logger.info("episode %s is scored although its agent raised: %s", opened.id, error)
            rewards.append({"reward": agent_error_reward, "name": AGENT_ERROR})
            return await _finish(client, opened, rewards, limits, truncated=True)
    both_rewarded = ""
    if function is not None:
        state = await client.get_episode(opened.id)
        if state["turns"]:
            by_agent = _rewards_by_name(state, rewards)
            try:
                workdir = agent.workdir_of(opened.id) if isinstance(agent, LeavesFiles) else None
                of_episode = [
                    {"name": n, "value": v, "target": ""} for (t, n), v in by_agent.items() if not t
                ]
                told = {**state, "rewards": of_episode}
                ended = finished_episode(told, truncated=limit.expired(), workdir=workdir)
                value = await function.of_episode(ended)
            except RewardError as failed:
                return await _fail(client, opened, str(failed))
            rewards.append({"reward": value, "name": "return"})
            both_rewarded = _both(by_agent, _rewards_by_name({**state, "rewards": []}, rewards[-1:]))
    elif must_reward and not rewards and not limit.expired():
        state = await client.get_episode(opened.id)
        if state["turns"] and not state["rewards"] and state["limit_reached"] is None:
            await client.fail(opened.id, _NO_REWARD)
            return Outcome("failed", rewarded=False, error=_NO_REWARD, is_unrewarded=True)
    outcome = await _finish(client, opened, rewards, limits, truncated=limit.expired())
    return replace(outcome, both_rewarded=both_rewarded)


def _rewards_by_name(
    state: Mapping[str, Any], rewards: Iterable[Mapping[str, Any]]
) -> dict[tuple[str, str], float]:
    """Return the last value of each reward by what it is for (a turn, or "" for the episode) and its name.

    Args:
        state: the proxy's description of the episode, with the rewards that were posted to it.
        rewards: the rewards that are written when it is sealed, as `Episode.reward` reports them.
    """
    turns = {turn["id"] for turn in state["turns"]}
    found = {(reward["target"], reward["name"]): reward["value"] for reward in state["rewards"]}
    for body in rewards:
        value, name, target = body["reward"], body.get("name", "return"), body.get("completion_id", "")
        if not isinstance(value, Mapping):
            found[target, name] = float(value)
        elif turns.issuperset(value):
            found |= {(turn, name): float(of_turn) for turn, of_turn in value.items()}
        else:
            found |= {(target, key): float(of_name) for key, of_name in value.items()}
    return found


def _both(agent: Mapping[tuple[str, str], float], function: Mapping[tuple[str, str], float]) -> str:
    """Return a sentence about an episode that its agent and the reward function rewarded, else ""."""
    if not agent or not function:
        return ""
    score = sum({**agent, **function}.values())
    said = f"the agent gave {_listed(agent)}, and reward: gave {_listed(function)}"
    if replaced := [name for target, name in agent if (target, name) in function]:
        others = "; the others count too" if len(replaced) < len(agent) else ""
        return f"{said}, which replaces the agent's {replaced[0]!r}{others}: the score is {score:g}"
    return f"{said}; both count: the score is {score:g}"


def _listed(rewards: Mapping[tuple[str, str], float]) -> str:
    shown = [f"{name} {value:g}" for (_, name), value in rewards.items()][:_SHOWN_REWARDS]
    more = f" and {len(rewards) - len(shown)} more" if len(rewards) > len(shown) else ""
    return ", ".join(shown) + more


def _concerns_the_connection(error: str) -> bool:
    """Whether the type of an exception, with which its description begins, is one of lost connections."""
    return error.partition(":")[0] in _CONNECTION_ERRORS


async def _ran_into_a_limit(client: AsyncClient, opened: OpenedEpisode) -> bool:
    """Whether the proxy refused a call because of a limit; the agent's exception is then no failure."""
    return (await client.get_episode(opened.id))["limit_reached"] is not None


async def _finish(
    client: AsyncClient,
    opened: OpenedEpisode,
    rewards: list[dict[str, Any]],
    limits: LimitsConfig,
    *,
    truncated: bool,
) -> Outcome:
    try:
        sealed = await client.finish(opened.id, truncated=truncated, rewards=rewards, require_turn=True)
    except RequestError as refused:
        if refused.code == "no_turn":
            if await _ran_into_a_limit(client, opened):
                beyond = limits.context_tokens is None and limits.max_tokens is None
                return await _fail(client, opened, _BEYOND_CONTEXT if beyond else _FIRST_PROMPT)
            within = (
                f" within {limits.time_s:g} s"
                if truncated
                else "; does its client use ep.base_url and ep.api_key?"
            )
            return await _fail(client, opened, f"the agent made no model call{within}")
        if refused.status in (400, 404):
            return await _fail(client, opened, f"a reward was refused: {refused.message}")
        raise
    if sealed["status"] == "failed":
        return Outcome("failed", rewarded=False, error="the engine failed on a model call of the agent")
    rewarded = bool(rewards) or sealed["status"] == "truncated" or await _has_reward(client, opened)
    return Outcome(sealed["status"], rewarded)


async def _has_reward(client: AsyncClient, opened: OpenedEpisode) -> bool:
    """Whether a reward was posted over HTTP, as commands do."""
    return bool((await client.get_episode(opened.id))["rewards"])


async def _fail(client: AsyncClient, opened: OpenedEpisode, error: str) -> Outcome:
    await client.fail(opened.id, error[:LONGEST_ERROR])
    return Outcome("failed", rewarded=False, error=error[:LONGEST_ERROR])


class FailureStreak:
    """Counts failures in a row over all tasks; any success resets the count.

    Args:
        limit: the number of failures in a row that is too many.
        least_s: the shortest time in seconds that they must have lasted, because one short outage fails many
            episodes at the same time.
    """

    def __init__(self, limit: int, *, least_s: float) -> None:
        self._limit = limit
        self._least_s = least_s
        self._failures = 0
        self._since_s = 0.0

    def note(self, error: str | None) -> None:
        """Record how an attempt ended. Raises AgentError after too many failures in a row."""
        if error is None:
            self._failures = 0
            return
        now = time.monotonic()
        if not self._failures:
            self._since_s = now
        self._failures += 1
        if self._failures >= self._limit and now - self._since_s >= self._least_s:
            raise AgentError(f"{self._failures} attempts in a row failed; the last error: {error}")


def backoff_s(failures: int) -> float:
    """Return the pause in seconds before a new attempt: 0.5, doubling with each failure, at most 30."""
    return min(30.0, 0.5 * 2.0 ** max(0, failures - 1))


async def abort_episodes(client: AsyncClient, episodes: Iterable[str], reason: str) -> None:
    """Abort open episodes that no runner runs."""
    for episode in episodes:
        try:
            await client.fail(episode, reason, aborted=True)
        except RequestError as refused:
            if refused.status != 409:  # not because the episode has already ended
                raise
