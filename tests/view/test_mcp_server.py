"""A coding agent reads a run with the real MCP client, over the standard input and output of the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import StdioServerParameters
from mcp.client import Client
from view_support import ATTACK, STEPS, make_run

Call = Callable[..., Awaitable[Any]]


async def ask(client: Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    text = result.content[0].text  # type: ignore[union-attr]
    assert not result.is_error, text
    return json.loads(text)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs")).parent


async def test_a_coding_agent_finds_the_worst_episode(root: Path) -> None:
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "areal_agents", "mcp", str(root)], cwd=str(Path.cwd())
    )
    async with Client(command) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"runs", "run", "metrics", "episodes", "episode", "step", "why"} <= tools.keys()
        assert all(tool.description for tool in tools.values())
        (run,) = await ask(client, "runs")
        assert (run["name"], run["state"], run["step"], run["after"]) == ("run", "finished", STEPS, 1.0)
        shown = await ask(client, "run", name="run")
        assert shown["health"] == [] and shown["newest_metrics"]["step"] == STEPS
        assert [point["label"] for point in shown["evaluations"]] == ["before", "after"]
        assert "reward_mean" in (await ask(client, "metrics", name="run"))["names"]
        curve = await ask(client, "metrics", name="run", metrics=["reward_mean"], last=2)
        assert curve == {"step": [2, 3], "reward_mean": [0.5, 0.75]}
        found = await ask(client, "episodes", name="run", split="train", max_reward=0, limit=2)
        assert len(found["episodes"]) == 2 and all(e["score"] == 0 for e in found["episodes"])
        further = await ask(client, "episodes", name="run", split="train", max_reward=0, before=found["next"])
        assert [e["id"] for e in further["episodes"]][-1] == "lyon-1-0"
        episode = await ask(client, "episode", name="run", episode="lyon-1-0")
        assert episode["turns"][0]["reply"]["tool_calls"][0]["name"] == "search"
        step = await ask(client, "step", name="run", step=1)
        assert {group["id"] for group in step["groups"]} == {"lyon@1", "nice@1"}
        evil = await ask(client, "episode", name="run", episode="evil")
        assert evil["error"] == ATTACK  # returned unchanged, as data
        for tool, arguments, said in (
            ("run", {"name": "../other"}, "there is no run"),
            ("episode", {"name": "run", "episode": "nobody"}, "nobody"),
            ("why", {"name": "run", "episode": "nobody"}, "areal-agents why failed"),
            ("why", {"name": "run", "episode": "evil", "token": 1}, "give turn, too"),
            ("episodes", {"name": "run", "status": "done"}, "'finished'"),
            ("step", {"name": "run", "step": 99}, "the run has no step 99; its last is 3"),
            ("step", {"name": "run", "step": 10**30}, "there is no step"),
            ("metrics", {"name": "run", "metrics": ["nothing"]}, "no metrics ['nothing']"),
        ):
            refused = await client.call_tool(tool, arguments)
            assert refused.is_error and said in refused.content[0].text  # type: ignore[union-attr]
