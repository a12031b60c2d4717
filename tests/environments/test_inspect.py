"""Tasks of Inspect AI, with the real package, through the running proxy."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from environment_support import REQUEST_S, Heard, handle, played, tasks
from integration_support import Stack

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.errors import AgentError, TaskEnvironmentError
from areal_agents.rollout.agents.environment_agent import HostedEnvironmentAgent, environment_agent
from integrations.conversations import call

pytestmark = pytest.mark.environments

FILE = Path(__file__).parent / "example_inspect.py"


def named(task: str) -> str:
    return f"inspect:{FILE}:{task}"


def test_the_samples_are_the_tasks_and_some_of_them_are_held_out(python: str) -> None:
    use = named("addition?count=30&seed=3")
    train, held_out = tasks(use, python), tasks(use, python, "eval")
    assert len(train) == 27 and len(held_out) == 3
    assert {int(str(row["id"])) for row in (*train, *held_out)} == set(range(1, 31))
    assert train[0]["input"] == "What is {0} + {0}?".format(train[0]["id"])


def test_the_solver_plays_with_its_own_tools_and_the_scorer_gives_the_reward(
    stack: Stack, python: str
) -> None:
    async def play() -> None:
        agent = environment_agent(EnvironmentConfig(use=named("addition?score=includes"), python=python))
        try:
            async with asyncio.timeout(REQUEST_S):
                said = Heard(call("add", '{"x": 4, "y": 4}'), "It is 8.")
                assert await agent.run({"id": "4"}, handle(stack, said)) == 1.0
                assert "What is 4 + 4?" in said.prompts[0] and "the first number" in said.prompts[0]
                assert "8" in said.news[1]
                # The same sample again, in the same evaluation.
                assert await agent.run({"id": "4"}, handle(stack, ["It is 9."])) == 0.0
        finally:
            await agent.close()

    asyncio.run(play())


def test_several_episodes_play_concurrently_and_can_be_cancelled(stack: Stack, python: str) -> None:
    """Two episodes never end and are cancelled; another one fails meanwhile."""

    async def play() -> None:
        agents = {
            name: environment_agent(EnvironmentConfig(use=named(name), python=python))
            for name in ("stuck", "broken")
        }
        try:
            async with asyncio.timeout(REQUEST_S):
                said = Heard("Hm.", "Hm.")
                ep = handle(stack, said)
                stuck = [asyncio.create_task(agents["stuck"].run({"id": "1"}, ep)) for _ in range(2)]
                while len(said.prompts) < 2:
                    await asyncio.sleep(0.01)
                with pytest.raises(AgentError, match="sample 2 is broken"):
                    await agents["broken"].run({"id": "2"}, handle(stack, ["So."]))
                for episode in stuck:
                    episode.cancel()
                assert all(
                    isinstance(end, asyncio.CancelledError)
                    for end in await asyncio.gather(*stuck, return_exceptions=True)
                )
                hosted = agents["stuck"]
                assert isinstance(hosted, HostedEnvironmentAgent) and hosted._started is not None
                assert not hosted._started.result()._playing  # the process has confirmed their end
        finally:
            for agent in agents.values():
                await agent.close()

    asyncio.run(play())


def test_the_solver_and_the_scorer_share_a_sandbox(stack: Stack, python: str) -> None:
    assert played(stack, named("files"), {"id": "1"}, ["banana"], python=python) == 3.0


def test_the_score_option_names_the_score_that_is_the_reward(stack: Stack, python: str) -> None:
    use, replies = named("measured"), ["It is 2."]
    assert played(stack, use + "?score=measures.length", {"id": "1"}, replies, python=python) == 8.0
    for score, fault in (
        ("", "has the scores includes, measures.length, measures.not_a_number, measures.words; name one"),
        ("?score=measures.not_a_number", "finite"),
    ):
        with pytest.raises(AgentError, match=re.escape(fault)):
            played(stack, use + score, {"id": "1"}, replies, python=python)


def test_the_model_does_not_grade_itself(stack: Stack, python: str) -> None:
    with pytest.raises(AgentError, match="the scorer asks the model under training; name another: grader="):
        played(stack, named("graded"), {"id": "1"}, Heard("It is 2."), python=python)
    use = named("graded?grader=kind/model")
    assert played(stack, use, {"id": "1"}, Heard("It is 3."), python=python) == 1.0


@pytest.mark.parametrize(
    ("use", "fault"),
    [
        (named("nothing"), "has no function 'nothing'"),
        (named("addition?number=3"), "unexpected keyword argument 'number'"),
        (named("unscored"), "has no scorer"),
        ("inspect:no_such_package/task", "no_such_package"),
    ],
)
def test_a_task_that_cannot_be_opened_is_refused_with_the_reason(use: str, fault: str, python: str) -> None:
    with pytest.raises(TaskEnvironmentError, match=re.escape(fault)):
        tasks(use, python)
