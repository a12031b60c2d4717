"""The same conversation in every mode in which an agent can run: all of them record the same episode."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from mode_agents import play
from mode_support import MODES_OF_PROGRAMS, needs
from openai import OpenAI

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import Task
from areal_agents.episode import Episode
from areal_agents.rollout.agents.agent import Agent, load_agent
from areal_agents.rollout.agents.attempt import Attempt, Outcome, open_attempt, run_rollout
from areal_agents.rollout.config import LimitsConfig
from integrations.environments import FOLDER, node_environment

HERE = Path(__file__).parent
ADMIN_KEY = "admin-key-of-the-tests"
TASK = {"question": "Do I need an umbrella in Zürich?", "answer": "Take one"}
MANY = 200


async def play_at_once(served: Any, agent: Agent, count: int) -> list[dict[str, Any]]:
    """Return the descriptions of `count` episodes that the agent plays at the same time, as in a run."""

    async def one(client: AsyncClient) -> dict[str, Any]:
        limits = LimitsConfig()
        opened = await open_attempt(client, Attempt(Task("umbrella", TASK), "train"), limits=limits)
        outcome = await run_rollout(client, agent, Task("umbrella", TASK), opened, limits=limits)
        assert outcome == Outcome("finished", rewarded=True)
        return await client.get_episode(opened.id, tokens=True)

    async with AsyncClient(served.url, ADMIN_KEY) as client:
        try:
            return await asyncio.gather(*(one(client) for _ in range(count)))
        finally:
            await agent.close()


async def play_in(served: Any, spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of an episode; `spec` names its agent as in a configuration."""
    (played,) = await play_at_once(served, load_agent(spec, workers=1), 1)
    return played


def record(played: Mapping[str, Any]) -> Any:
    """Return what must not depend on the mode: turns are identified by index, and times are left out."""
    places = {turn["id"]: index for index, turn in enumerate(played["turns"])}
    turns = [
        {
            **{
                key: turn[key]
                for key in ("prompt_ids", "token_ids", "logprobs", "versions", "finish_reason", "sampling")
            },
            "parent": places.get(turn["parent"]),
            "forked_from": turn["forked_from"],
        }
        for turn in played["turns"]
    ]
    rewards = [(places.get(given["target"]), given["name"], given["value"]) for given in played["rewards"]]
    return {"status": played["status"], "turns": turns, "rewards": sorted(rewards, key=str)}


@pytest.fixture
async def expected(scripted: Any) -> Any:
    """The record of the async function, after a check that it has the expected conversation."""
    found = record(await play_in(scripted, f"{HERE / 'mode_agents.py'}:as_coroutine"))
    first, second = found["turns"]
    assert (first["parent"], second["parent"]) == (None, 0)
    begun = first["prompt_ids"] + first["token_ids"]
    assert second["prompt_ids"][: len(begun)] == begun and len(second["prompt_ids"]) > len(begun)
    assert found["rewards"] == [(0, "looked up", 0.25), (None, "return", 1.0)]
    assert all(len(turn["logprobs"]) == len(turn["token_ids"]) > 5 for turn in found["turns"])
    return found


async def test_a_function_in_a_worker_process_records_the_same(scripted: Any, expected: Any) -> None:
    assert record(await play_in(scripted, f"{HERE / 'mode_agents.py'}:in_a_worker")) == expected


@pytest.mark.parametrize(("function", "count"), [("as_coroutine", MANY), ("in_a_worker", 1)])
async def test_a_client_that_was_created_before_the_episode_records_the_same(
    scripted: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, function: str, count: int
) -> None:
    """The async client is shared by hundreds of concurrent episodes."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{scripted.url}/v1")
    agent = load_agent(f"{HERE / 'module_client_agents.py'}:{function}", workers=1)
    played = await play_at_once(scripted, agent, count)
    assert len({episode["id"] for episode in played}) == count
    assert [record(episode) for episode in played] == [expected] * count


async def test_a_decorated_function_as_a_command_records_the_same(scripted: Any, expected: Any) -> None:
    command = shlex.join([sys.executable, str(HERE / "mode_agents.py")])
    assert record(await play_in(scripted, {"command": command})) == expected


@pytest.mark.usefixtures("slurm_programs", "kubernetes_programs")
@pytest.mark.parametrize("mode", MODES_OF_PROGRAMS)
async def test_a_program_records_the_same_in_every_mode(scripted: Any, expected: Any, mode: str) -> None:
    needs(mode)
    agent = MODES_OF_PROGRAMS[mode](HERE / "mode_program.py", scripted.folder)
    assert record(await play_in(scripted, agent)) == expected


async def test_a_program_in_node_records_the_same(scripted: Any, expected: Any) -> None:
    needs("node")
    folder = FOLDER / "openai_node"
    node = node_environment(folder).node
    command = shlex.join([str(node), str(HERE / "mode_agent.mjs"), str(folder)])
    assert record(await play_in(scripted, {"command": command})) == expected


def test_a_program_outside_of_the_run_records_the_same_over_http(scripted: Any, expected: Any) -> None:
    """A program that the run does not know opens an episode and plays it."""
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=scripted.url, headers=admin, timeout=30, trust_env=False) as http:

        def post(path: str, body: Any) -> Any:
            response = http.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        limits = LimitsConfig().model_dump(exclude_none=True)
        opened = post("/episodes", {"task": {"id": "umbrella", "input": TASK}, "limits": limits})
        ep = Episode(
            opened["id"], opened["base_url"], opened["key"], lambda path, body: post(f"{at}/{path}", body)
        )
        at = f"/episodes/{ep.id}"
        with OpenAI(base_url=ep.base_url, api_key=ep.api_key) as client:
            ep.reward(play(client, TASK, ep))
        post(f"{at}/finish", {})
        played = http.get(at, params={"tokens": 1}).json()
    assert record(played) == expected
