"""The real mini-swe-agent plays a repair task, with exactly the tokens of the demonstration."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from demonstrator import CAREFUL, Demonstrator, Habits, play
from dialogue import command_text
from integration_support import Stack, running_stack
from repairs import heldout_tasks, sample_repair
from reward import solved
from tokenizers import Tokenizer

from areal_agents.config import load_config
from areal_agents.episode import Episode
from areal_agents.rewards import FinishedEpisode
from areal_agents.rollout.agents.cli.agent import CliAgent
from areal_agents.rollout.agents.cli.config import CliAgentConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "repair_tasks"
EPISODE_S = 120

pytestmark = pytest.mark.environments


@pytest.fixture
def program(request: pytest.FixtureRequest) -> str:
    """The program of mini-swe-agent (`make environments`)."""
    folder = Path(request.config.getoption("--environments")).absolute().parents[1]
    return str(folder.with_name(f"{folder.name}-mini-swe-agent") / "bin" / "mini")


def test_a_group_of_two_is_played_as_it_is_demonstrated(program: str, tmp_path: Path) -> None:
    task = heldout_tasks()[0]
    repair = sample_repair(random.Random("heldout/0"), held_out=True)  # the same task
    # The first makes a mistake that its test finds, and repairs it; the second submits at once.
    seed = next(n for n in range(100) if len(play(repair, CAREFUL, random.Random(n))[0]) == 4)
    habits = [(CAREFUL, seed), (Habits(submit_at_once=1.0), 0)]
    demonstrator = Demonstrator(Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json")))
    with running_stack(EXAMPLE / "model", tmp_path / "store.db") as stack:
        rewards = []
        for habit, number in habits:
            commands, _, _ = play(repair, habit, random.Random(number))
            shown = demonstrator.demonstrate(repair, habit, random.Random(number))
            reward, turns = asyncio.run(played(stack, program, task, [command_text(c) for c in commands]))
            rewards.append(reward)
            assert [turn["forked_from"] for turn in turns] == [None] * len(commands)
            last = turns[-1]
            assert (*last["prompt_ids"], *last["token_ids"]) == shown.ids
    assert rewards == [1.0, 0.0]


async def played(
    stack: Stack, program: str, task: dict[str, Any], replies: Sequence[str]
) -> tuple[float, list[dict[str, Any]]]:
    """The reward and the recorded turns of an episode of the example's configuration."""
    opened = stack.open_episode(replies)
    config = load_config(EXAMPLE / "config.yaml").agent
    assert isinstance(config, dict)
    agent = CliAgent(CliAgentConfig.read({**config, "executable": program}))
    try:
        async with asyncio.timeout(EPISODE_S):
            await agent.run(task, Episode(opened["id"], opened["base_url"], opened["key"]))
        left = FinishedEpisode(opened["id"], task, (), "finished", {}, agent.workdir_of(opened["id"]))
        return solved(left), stack.turns(opened)
    finally:
        await agent.close()
