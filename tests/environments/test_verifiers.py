"""Environments of verifiers 0.4 and 0.3, with the real packages, through the running proxy."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from environment_support import REQUEST_S, Heard, handle, tasks
from integration_support import Stack

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.errors import AgentError, TaskEnvironmentError
from areal_agents.rollout.agents.environment_agent import environment_agent
from areal_agents.testing import ScriptedCall
from integrations.conversations import call

pytestmark = pytest.mark.environments

FOLDER = Path(__file__).parent
TASKSET = f"verifiers:{FOLDER / 'example_taskset.py'}"
OLDER = f"verifiers:{FOLDER / 'example_older_verifiers.py'}"


def answers(asked: ScriptedCall) -> str:
    if "What is 9 + 9" in asked.prompt_text:
        return "I raise."
    return "It is 8." if "What is 4 + 4" in asked.prompt_text else "It is 1."


def test_a_taskset_is_played_by_its_own_agent_and_graded(stack: Stack, verifiers_python: str) -> None:
    """Three episodes play concurrently. The first use creates an environment of uv, which takes a minute."""
    use = f"{TASKSET}?count=0&size=10&held_out=2"
    train, held_out = (tasks(use, verifiers_python, split) for split in ("train", "eval"))  # type: ignore[arg-type]
    assert len(train) == 10 and len(held_out) == 2
    assert {row["prompt"] for row in (*train, *held_out)} == {f"What is {n} + {n}?" for n in range(1, 13)}

    async def play() -> None:
        agent = environment_agent(EnvironmentConfig(use=use, python=verifiers_python))
        try:
            async with asyncio.timeout(REQUEST_S):
                ep = handle(stack, answers)
                ends = await asyncio.gather(
                    *(agent.run({"id": id}, ep) for id in ("3", "4", "8")), return_exceptions=True
                )
                assert ends[:2] == [2.0, 0.0]  # weight 2
                assert isinstance(ends[2], AgentError) and "this reply cannot be graded" in str(ends[2])
        finally:
            await agent.close()

    asyncio.run(play())


def test_an_older_environment_is_played_with_its_tools(stack: Stack, older_verifiers_python: str) -> None:
    use = f"{OLDER}?count=6"
    assert [row["id"] for row in tasks(use, older_verifiers_python, "eval")] == ["eval-0", "eval-1"]

    async def play() -> None:
        agent = environment_agent(EnvironmentConfig(use=use, python=older_verifiers_python))
        try:
            async with asyncio.timeout(REQUEST_S):
                said = Heard(call("add", '{"x": 4, "y": 4}'), "It is 8.")
                assert await agent.run({"id": "1"}, handle(stack, said)) == 1.0
                assert "the first number" in said.prompts[0] and "8" in said.news[1]
                assert await agent.run({"id": "eval-1"}, handle(stack, ["It is 5."])) == 0.0
                with pytest.raises(AgentError, match="has no task '9' any more"):
                    await agent.run({"id": "9"}, handle(stack, []))
        finally:
            await agent.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("use", "fault"),
    [
        (OLDER, "has load_environment(), which needs verifiers 0.3"),
        ("verifiers:no-such-taskset", "taskset 'no-such-taskset' not found"),
        (f"{TASKSET}?count=0", "has endless tasks; give their number, size="),
        (f"{TASKSET}?colour=red", "colour"),
    ],
)
def test_an_environment_that_cannot_be_opened_is_refused_with_the_reason(
    use: str, fault: str, verifiers_python: str
) -> None:
    with pytest.raises(TaskEnvironmentError, match=re.escape(fault)):
        tasks(use, verifiers_python)
