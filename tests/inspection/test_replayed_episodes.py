"""An agent is run against its recorded replies, and changes in its behavior are found."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inspection_support import MODEL, running_proxy, tool_call
from scripted_sampler import ScriptedSampler
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.client import AsyncClient
from areal_agents.core.rollout import Task
from areal_agents.errors import ConfigError
from areal_agents.rendering import ChatRenderer
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.attempt import Attempt, open_attempt, run_rollout
from areal_agents.rollout.config import LimitsConfig
from areal_agents.store import NewEpisode, Store

AGENTS = Path(__file__).parent / "replayed_agents.py"
TASK = Task("t", {"question": "Where is Lyon?"})


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """An episode of two calls, the store that contains it, and a configuration with the recorded agent."""
    folder = tmp_path_factory.mktemp("replay")
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL))
    replies = iter((tool_call(query="Lyon"), "Lyon is in France."))
    engine.script = lambda call: next(replies)

    async def record(url: str) -> str:
        limits = LimitsConfig(time_s=60)
        async with AsyncClient(url) as client:
            opened = await open_attempt(client, Attempt(TASK, "train"), limits=limits)
            await run_rollout(client, load_agent(f"{AGENTS}:agent"), TASK, opened, limits=limits)
            return opened.id

    with running_proxy(folder / "store.db", engine) as proxy:
        episode = asyncio.run(record(proxy.url))
    (folder / "tasks.jsonl").write_text('{"question": "Where is Lyon?"}\n')
    config = folder / "config.yaml"
    config.write_text(f"model: {MODEL}\nagent: {AGENTS}:agent\ndata: {{path: tasks.jsonl}}\n")
    return episode, folder / "store.db", config


def replayed(recording: tuple[str, Path, Path], agent: str) -> tuple[int, dict[str, Any], str]:
    """Replay the episode, and return the exit status, the JSON output and the text output."""
    given = ["replay", *map(str, recording), f"agent={AGENTS}:{agent}"]
    as_json = CliRunner().invoke(app, [*given, "--json"])
    text = CliRunner().invoke(app, given)
    assert as_json.exit_code == text.exit_code, (as_json.output, text.output)
    return as_json.exit_code, json.loads(as_json.output.splitlines()[-1]), text.output


def test_an_unchanged_agent_makes_the_recorded_calls(recording: tuple[str, Path, Path]) -> None:
    code, found, text = replayed(recording, "agent")
    assert code == 0 and found["is_same"] and found["difference"] is None
    assert found["replayed_calls"] == 2 and found["replayed_rewards"] == {"return": 1.0}
    assert "the same: 2 calls, recorded 2, rewards return 1" in text


def test_the_first_request_that_differs_is_shown(recording: tuple[str, Path, Path]) -> None:
    code, found, text = replayed(recording, "other_result")
    assert code == 1 and (found["difference"]["call"], found["difference"]["message"]) == (2, 3)
    assert "call 2 is the first that differs, from message 3 on" in text
    assert "recorded: tool: In France" in text and "now: tool: In Europe" in text


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("other_reward", "rewards: recorded return 1, now return 0.5"),
        ("fewer_calls", "different: 1 calls, recorded 2"),
        ("more_calls", "the recording has no further reply"),
        ("crashes", "the replayed episode failed: KeyError: 'a changed tool'"),
    ],
)
def test_other_rewards_numbers_of_calls_and_failures_are_reported(
    recording: tuple[str, Path, Path], agent: str, message: str
) -> None:
    code, found, text = replayed(recording, agent)
    assert code == 1 and not found["is_same"] and message in text


def test_a_store_alone_needs_the_configuration_of_the_agent(recording: tuple[str, Path, Path]) -> None:
    with pytest.raises(ConfigError, match="has no configuration; name the one of the agent"):
        CliRunner().invoke(app, ["replay", recording[0], str(recording[1])], catch_exceptions=False)


def test_only_the_calls_of_an_aborted_episode_are_compared(
    recording: tuple[str, Path, Path], tmp_path: Path
) -> None:
    episode, file, config = recording
    shutil.copy(file, tmp_path / "store.db")
    with Store.open(tmp_path / "store.db") as store:
        first = replace(store.load_episode(episode).turns[0], id="only-turn")
        store.open_episode(NewEpisode("cut", "hash of cut", TASK)).result()
        store.add_turn("cut", first).result()
        store.seal("cut", "aborted").result()
    code, found, text = replayed(("cut", tmp_path / "store.db", config), "agent")
    assert code == 0 and found["is_same"] and found["recorded_status"] == "aborted"
    assert "the recorded episode was aborted" in text and "rewards" not in text
    code, found, text = replayed(("cut", tmp_path / "store.db", config), "other_question")
    assert code == 1 and not found["is_same"] and "call 1 is the first that differs" in text
