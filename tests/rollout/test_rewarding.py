"""Separate reward functions, of episodes and of groups, with the real proxy and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import Task
from areal_agents.errors import RewardError
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.attempt import Attempt, FailureStreak, open_attempt, run_rollout
from areal_agents.rollout.config import LimitsConfig, RewardConfig, RolloutConfig
from areal_agents.rollout.data import TaskSource
from areal_agents.rollout.groups.collector import Collector
from areal_agents.rollout.rewarding import FinishedEpisode, RewardFunction, RewardValue, finished_episode
from areal_agents.store.store import Store

FUNCTIONS = Path(__file__).parents[1] / "rewards" / "reward_functions.py"
AGENTS = Path(__file__).parent / "rollout_agents.py"
ADMIN_KEY = "admin-key-of-the-tests"
LIMITS = LimitsConfig(time_s=60)


def function(name: str, **settings: Any) -> RewardFunction:
    return RewardFunction(RewardConfig(episode=f"{FUNCTIONS}:{name}", **settings))


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("by_length", {"return": 2.0}), ("by_name", {"turns": 1.0, "polite": 0.5})],
)
async def test_a_function_rewards_an_episode(served: Any, name: str, rewards: dict[str, float]) -> None:
    agent = load_agent(f"{AGENTS}:unrewarded")
    async with AsyncClient(served.url, ADMIN_KEY) as client:
        opened = await open_attempt(client, Attempt(Task("t", {}), "train"), limits=LIMITS)
        outcome = await run_rollout(
            client, agent, Task("t", {}), opened, limits=LIMITS, must_reward=False, function=function(name)
        )
    assert outcome.status == "finished" and outcome.rewarded
    found = served.store.load_episode(opened.id)
    assert {reward.name: reward.value for reward in found.rewards} == rewards


@pytest.mark.parametrize(
    ("agent", "name", "rewards", "said"),
    [
        (
            "by_name",
            "by_length",
            {"correct": 1.0, "style": 0.5, "return": 2.0},
            "the agent gave correct 1, style 0.5, and reward: gave return 2; both count: the score is 3.5",
        ),
        (
            "by_name",
            "style",
            {"correct": 1.0, "style": 0.25},
            "the agent gave correct 1, style 0.5, and reward: gave style 0.25, which replaces the agent's "
            "'style'; the others count too: the score is 1.25",
        ),
        (
            "good",
            "by_length",
            {"return": 2.0},
            "the agent gave return 1, and reward: gave return 2, which replaces the agent's 'return': the "
            "score is 2",
        ),
        (
            "rewards_itself",
            "told",
            {"turn": 0.5, "return": 1.0, "told return": 10.0},
            "the agent gave turn 0.5, return 1, and reward: gave told return 10; both count: the score is "
            "11.5",
        ),
        ("unrewarded", "by_length", {"return": 2.0}, ""),
    ],
)
async def test_the_rewards_of_a_function_are_added_to_those_of_the_agent(
    served: Any, agent: str, name: str, rewards: dict[str, float], said: str
) -> None:
    loaded = load_agent(f"{AGENTS}:{agent}")
    async with AsyncClient(served.url, ADMIN_KEY) as client:
        opened = await open_attempt(client, Attempt(Task("t", {}), "train"), limits=LIMITS)
        outcome = await run_rollout(
            client, loaded, Task("t", {}), opened, limits=LIMITS, function=function(name)
        )
    found = served.store.load_episode(opened.id)
    assert {reward.name: reward.value for reward in found.rewards} == rewards
    assert outcome.both_rewarded == said
    assert not said or said.endswith(f"the score is {found.score:g}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", r"reward_functions.py:fails failed: KeyError: 'no such rubric' \(.*, line \d+\)"),
        ("gives_nothing", "a reward must be a number, got None"),
        ("hangs", r"did not return within 0.3 s \(reward.time_s\)"),
        ("sleeps", r"did not return within 0.3 s \(reward.time_s\)"),
        ("exits", "exits failed: SystemExit: no such file"),
        ("exits_in_the_loop", "exits_in_the_loop failed: SystemExit: no such file"),
        ("interrupts", "interrupts failed: .*KeyboardInterrupt"),
        ("gives_too_much", "a reward must be a number that a float can hold"),
    ],
)
async def test_a_function_that_fails_fails_the_episode(served: Any, name: str, message: str) -> None:
    agent = load_agent(f"{AGENTS}:unrewarded")
    fails = function(name, time_s=0.3 if name in ("hangs", "sleeps") else 60)
    async with AsyncClient(served.url, ADMIN_KEY) as client:
        opened = await open_attempt(client, Attempt(Task("t", {}), "train"), limits=LIMITS)
        outcome = await run_rollout(client, agent, Task("t", {}), opened, limits=LIMITS, function=fails)
    assert (outcome.status, served.store.episode_row(opened.id).status) == ("failed", "failed")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outcome.error)


def test_functions_that_never_return_block_neither_others_nor_the_end_of_the_loop() -> None:
    state = {"id": "e", "task": {"input": {}}, "turns": [], "rewards": [], "limit_reached": None}
    episode = finished_episode(state, truncated=False)

    async def rewards() -> tuple[list[Any], Any]:
        hung = function("waits_forever", time_s=0.2)
        # More calls than the event loop's pool has threads, of which there are at most 32.
        lost = await asyncio.gather(*(hung.of_episode(episode) for _ in range(33)), return_exceptions=True)
        return lost, await function("by_length", time_s=20).of_episode(episode)

    lost, reward = asyncio.run(rewards())  # shuts the thread pool down, and waits for its threads
    assert all(isinstance(error, RewardError) and "within 0.2 s" in str(error) for error in lost)
    assert reward == 0.0


def test_an_absent_function_is_named() -> None:
    with pytest.raises(RewardError, match="reward_functions.py has no function 'absent'"):
        function("absent")


async def test_a_function_of_groups_must_reward_each_episode() -> None:
    rank = RewardFunction(RewardConfig(group=f"{FUNCTIONS}:too_few"))
    state = {"id": "e", "task": {"input": {}}, "turns": [], "rewards": [], "limit_reached": None}
    with pytest.raises(RewardError, match="must return a list of 1 rewards"):
        await rank.of_episode(finished_episode(state, truncated=False))


def test_every_branch_is_a_conversation() -> None:
    def turn(id: str, parent: str | None, text: str) -> dict[str, Any]:
        return {"id": id, "parent": parent, "new_messages": [{"u": text}], "reply": {"a": text}}

    turns = [turn("1", None, "x"), turn("2", "1", "y"), turn("3", "1", "z")]
    reward = {"name": "return", "value": 1.0, "target": ""}
    state = {"id": "e", "task": {"input": {}}, "turns": turns, "rewards": [reward], "limit_reached": None}
    found = finished_episode(state, truncated=True)
    beginning = [{"u": "x"}, {"a": "x"}]
    assert found.branches == ([*beginning, {"u": "y"}, {"a": "y"}], [*beginning, {"u": "z"}, {"a": "z"}])
    assert found.messages == found.branches[1] and found.rewards == {"return": 1.0}
    assert found.status == "truncated"


class LateOnce(RewardFunction):
    """Ranks its first group only after the proxy has failed every episode because it had no reward."""

    store: Store
    calls = 0

    async def of_group(self, episodes: Sequence[FinishedEpisode]) -> list[RewardValue]:
        self.calls += 1
        if self.calls == 1:
            async with asyncio.timeout(60):
                while self.store.unrewarded_episodes():
                    await asyncio.sleep(0.02)
        return await super().of_group(episodes)


@pytest.mark.parametrize(
    ("case", "reward_timeout_s"),
    [("at once", 60.0), ("restarted", 60.0), ("late", 1.0)],
    ids=["at once", "restarted", "late"],
)
async def test_a_group_is_complete_when_its_function_has_rewarded_it(served: Any, case: str) -> None:
    """After a restart, a group whose episodes have all ended without rewards is rewarded.

    So is a group whose rewards came too late, after its episodes have been played again.
    """
    served.publish(0)
    config = RolloutConfig(groups=1, group_size=4, concurrency=4, limits=LIMITS)
    rewarding = RewardConfig(group=f"{FUNCTIONS}:by_rank")
    rank = LateOnce(rewarding) if case == "late" else RewardFunction(rewarding)
    if isinstance(rank, LateOnce):
        rank.store = served.store

    async def collect(function: RewardFunction | None) -> None:
        agent = load_agent(f"{AGENTS}:unrewarded")
        async with AsyncClient(served.url, ADMIN_KEY) as client:
            collector = Collector(
                client=client,
                store=served.store,
                agent=agent,
                source=TaskSource((Task("t", {}),), seed=0),
                config=config.model_copy(update={"outside_rewards": True}),
                steps=1,
                changed=ticking,
                patience=FailureStreak(3, least_s=0),
                function=function,
            )
            running = asyncio.create_task(collector.run())
            try:
                async with asyncio.timeout(60):
                    while not reached():
                        ticking.set()
                        await asyncio.sleep(0.02)
            finally:
                running.cancel()
                await asyncio.wait({running})

    def scores() -> list[float]:
        found = served.store.episodes(group_id="t@0")
        return [episode.score for episode in found if episode.score is not None]

    ticking = asyncio.Event()
    if case == "restarted":
        reached = lambda: len(served.store.unrewarded_episodes()) == 4  # noqa: E731
        await collect(None)
    reached = lambda: len(scores()) == 4  # noqa: E731
    await collect(rank)
    assert sorted(scores()) == [0.0, 0.25, 0.5, 0.75]
    if case == "late":
        assert len(served.store.episodes(group_id="t@0")) > 4
