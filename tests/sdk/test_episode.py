from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAI

import areal_agents
from areal_agents import Episode, current_key, episode
from areal_agents.core.reward_values import checked_reward
from areal_agents.episode import running
from areal_agents.errors import AgentError

ASK: Any = [{"role": "user", "content": "who am I?"}]


def test_the_decorator_is_public_even_after_its_module_is_imported() -> None:
    code = (
        "import areal_agents.episode, areal_agents; from areal_agents import episode;"
        "assert callable(episode) and callable(areal_agents.episode);"
        "names = areal_agents.__all__; print(sorted(names) == names, set(names) <= set(dir(areal_agents)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "True"]
    assert all(getattr(areal_agents, name) is not None for name in areal_agents.__all__)


def test_importing_loads_no_http_client_and_no_numpy() -> None:
    heavy = ("torch", "numpy", "pydantic", "httpx", "asyncio", "openai")
    code = f"import sys, areal_agents; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


async def test_outside_a_run_an_agent_works_against_the_environment(echo, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    @episode
    async def agent(task: dict, ep: Episode) -> float:
        client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
        answer = await client.chat.completions.create(model="policy", messages=ASK)
        ep.reward(0.5, name="effort")
        return float(answer.choices[0].message.content == "sk-mine")

    monkeypatch.setenv("OPENAI_BASE_URL", f"{echo.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    assert await agent({}) == 1.0
    assert echo.calls == []


def test_a_sync_agent_stays_sync_and_an_explicit_handle_is_used(echo, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    @episode
    def agent(task: dict, ep: Episode) -> str:
        """What it does."""
        return ep.api_key

    monkeypatch.setenv("OPENAI_BASE_URL", f"{echo.url}/v1")
    assert agent.__doc__ == "What it does."
    assert agent({}, Episode("e", "http://h/v1", "ep-2")) == "ep-2"
    assert agent({}) == "EMPTY"


async def test_rewards_of_an_agent_that_a_run_starts_go_to_its_episode(echo, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    @episode
    async def agent(task: dict, ep: Episode) -> bool:
        ep.reward({"chatcmpl-1": 0.25})
        ep.reward(0.5, completion_id="chatcmpl-2", name="style")
        return True

    monkeypatch.setenv("OPENAI_BASE_URL", f"{echo.url}/e/ep-7/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "ep-7")
    monkeypatch.setenv("AREAL_AGENTS_EPISODE_ID", "e7")
    assert await agent({}) is True
    path = "/episodes/e7/reward"
    assert echo.calls == [
        ("POST", path, "ep-7", {"reward": {"chatcmpl-1": 0.25}}),
        ("POST", path, "ep-7", {"reward": 0.5, "completion_id": "chatcmpl-2", "name": "style"}),
        ("POST", path, "ep-7", {"reward": 1.0, "name": "return"}),
    ]


def test_functions_that_cannot_be_agents_are_refused() -> None:
    with pytest.raises(AgentError, match=r"cannot be called as only_task\(task, ep\)"):

        @episode
        def only_task(task: dict) -> None: ...

    with pytest.raises(AgentError, match="generator"):

        @episode
        async def streams(task: dict, ep: Episode):  # type: ignore[no-untyped-def]
            yield 1


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), Decimal(1)])
def test_numbers_of_every_kind_are_rewards(value: Any) -> None:
    assert checked_reward(value) == 1.0


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "1", None, [1.0], {}, {"a": math.nan}, {"a": "x"}, {1: 0.5}, {"": 0.5}, 1e308],
)
def test_invalid_rewards_are_refused(value: Any) -> None:
    with pytest.raises(AgentError, match="reward"):
        checked_reward(value)


def handles(n: int) -> list[Episode]:
    return [Episode(f"e{i}", "unused", f"ep-{i}") for i in range(n)]


async def test_one_async_client_serves_fifty_concurrent_episodes_without_mixing_keys(echo) -> None:  # type: ignore[no-untyped-def]
    client = AsyncOpenAI(base_url=f"{echo.url}/v1", api_key=current_key)

    async def agent(ep: Episode) -> list[str]:
        seen = []
        with running(ep):
            for _ in range(4):
                answer = await client.chat.completions.create(model="policy", messages=ASK)
                seen.append(answer.choices[0].message.content)
                await asyncio.sleep(0)
        return seen

    episodes = handles(50)
    answers = await asyncio.gather(*(agent(ep) for ep in episodes))
    assert answers == [[ep.api_key] * 4 for ep in episodes]


def test_one_sync_client_serves_threads_without_mixing_keys(echo) -> None:  # type: ignore[no-untyped-def]
    client = OpenAI(base_url=f"{echo.url}/v1", api_key=current_key)
    barrier = threading.Barrier(8)

    def agent(ep: Episode) -> list[str]:
        barrier.wait(timeout=60)
        with running(ep):
            answers = [client.chat.completions.create(model="policy", messages=ASK) for _ in range(4)]
        return [answer.choices[0].message.content for answer in answers]

    episodes = handles(8)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(agent, episodes)) == [[ep.api_key] * 4 for ep in episodes]


async def test_a_client_derived_for_the_episode_calls_with_its_key(echo) -> None:  # type: ignore[no-untyped-def]
    shared = AsyncOpenAI(base_url="http://unused.invalid/v1", api_key="unused")
    ep = Episode("e1", f"{echo.url}/e/ep-1/v1", "ep-1")
    client = shared.with_options(api_key=ep.api_key, base_url=ep.base_url)
    answer = await client.chat.completions.create(model="policy", messages=ASK)
    assert answer.choices[0].message.content == "ep-1"
    assert client._client is shared._client  # the pool is shared, so deriving is cheap


def test_the_key_follows_the_context_and_nothing_else(echo, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    seen: list[str] = []
    with running(Episode("e", "u", "ep-1")):
        with running(Episode("e", "u", "ep-2")):
            assert current_key() == "ep-2"
        assert current_key() == "ep-1"
        thread = threading.Thread(target=copy_context().run, args=(lambda: seen.append(current_key()),))
        thread.start()
        thread.join()
    assert seen == ["ep-1"]
    with pytest.raises(AgentError, match="no episode is running"):
        current_key()
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    assert current_key() == "sk-mine"
