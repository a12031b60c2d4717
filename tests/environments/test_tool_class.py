"""A class whose methods are tools, through the running proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from environment_support import Heard, handle, played
from integration_support import Stack

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.environments.environment import open_environment
from areal_agents.environments.line import EnvironmentLine
from areal_agents.errors import AgentError, TaskEnvironmentError
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.environment_agent import environment_agent, environment_tasks
from areal_agents.user_functions import load_function
from integrations.conversations import call

FILE = Path(__file__).parent / "example_environments.py"
COUNTER = f"tools:{FILE}:Counter"
TASK = {"id": "1", "question": "Count.", "target": 6}


def test_the_model_calls_methods_until_it_answers(stack: Stack) -> None:
    said = Heard(
        call("add", '{"amount": 2}') + "\n" + call("add", '{"amount": "2", "times": 2}'),
        call("look", "{}"),
        "Done.",
    )
    assert played(stack, COUNTER, TASK, said) == 1.0
    begin, results, looked = said.news
    assert "Count.\n\nReach 6." in begin and "how much to add, a positive number" in begin
    assert (
        '"times"' in begin and "_hidden" not in begin and "get_reward" not in begin and '"tasks"' not in begin
    )
    assert "The total is 2." in results and "The total is 6." in results and '{"total": 6}' in looked


def test_errors_are_results_that_the_model_reads(stack: Stack) -> None:
    said = Heard(
        call("add", '{"amount": -1}'),
        call("add", '{"amount": "many"}'),
        call("subtract", "{}"),
        "I give up.",
    )
    assert played(stack, COUNTER, TASK, said) == 0.0
    _, negative, no_number, unknown = said.news
    assert "Error: ValueError: the amount is negative" in negative
    assert "valid integer" in no_number
    assert "there is no tool 'subtract'; there are add, look" in unknown


def test_each_task_is_played_in_the_environment_of_its_source(stack: Stack) -> None:
    """The class gets the row without the name of the source, as it expects."""
    uses = [{"name": "count", "use": COUNTER}, {"name": "fixed", "use": f"tools:{FILE}:Strict"}]
    agent = load_agent({"environments": uses})
    assert agent.must_reward

    async def play() -> None:
        counted = {**TASK, "data_source": "count"}
        ep = handle(stack, [call("add", '{"amount": 6}'), "Done."])
        assert await agent.run(counted, ep) == 1.0
        strict = {"id": "1", "question": "?", "data_source": "fixed"}
        assert await agent.run(strict, handle(stack, ["Done."])) == 0.5
        with pytest.raises(AgentError, match="data_source: 'x', and there are the environments count, fixed"):
            await agent.run({**TASK, "data_source": "x"}, ep)
        await agent.close()

    asyncio.run(play())


def test_turns_are_limited_and_each_episode_has_an_object_of_its_own(stack: Stack) -> None:
    said = Heard(*[call("add", '{"amount": 3}')] * 9)
    assert played(stack, COUNTER + "?max_turns=2", TASK, said) == 1.0  # 3 + 3
    assert len(said.prompts) == 2
    assert played(stack, COUNTER + "?max_turns=1", TASK, Heard(call("add", '{"amount": 3}'))) == 0.0


def test_a_reward_may_be_an_attribute_and_is_required(stack: Stack) -> None:
    task = {"id": "1", "prompt": [{"role": "user", "content": "Go."}]}
    assert played(stack, f"tools:{FILE}:Attribute", task, ["Done."]) == 0.25
    with pytest.raises(TaskEnvironmentError, match=r"neither get_reward\(\) nor"):
        played(stack, f"tools:{FILE}:Unrewarded", task, ["Done."])
    with pytest.raises(TaskEnvironmentError, match="has no prompt, messages, question, instruction, input"):
        played(stack, f"tools:{FILE}:Attribute", {"id": "1"}, ["Done."])


def test_a_tool_that_exits_ends_neither_its_thread_nor_the_process(stack: Stack) -> None:
    said = Heard(call("stop", "{}"), call("noop", "{}"), "Done.")
    assert played(stack, f"tools:{FILE}:Attribute", {"id": "1", "prompt": "Go."}, said) == 0.25
    assert "the function raised SystemExit(3)" in said.news[1] and "nothing" in said.news[2]


def test_arguments_and_columns_may_have_any_name(stack: Stack) -> None:
    task = {"id": "1", "prompt": "Go.", "function": "f", "thread": 2}
    said = Heard(call("plot", '{"function": "sin"}'), "Done.")
    assert played(stack, f"tools:{FILE}:Attribute", task, said) == 0.25
    assert "plotted sin" in said.news[1]


def test_an_object_is_closed_after_its_episode(stack: Stack) -> None:
    assert played(stack, f"tools:{FILE}:AsyncClose", {"prompt": "Go."}, ["Done."]) == 0.5
    assert load_function(f"{FILE}:AsyncClose", TaskEnvironmentError).closed == 1  # type: ignore[attr-defined]


def test_a_cancelled_episode_does_not_wait_for_its_tool(stack: Stack) -> None:
    async def play() -> None:
        agent = environment_agent(EnvironmentConfig(use=f"tools:{FILE}:Slow"))
        said = Heard(call("wait", "{}"))
        episode = asyncio.create_task(agent.run({"prompt": "Go."}, handle(stack, said)))
        while not said.prompts:
            await asyncio.sleep(0.01)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await agent.close()

    asyncio.run(asyncio.wait_for(play(), 20))  # the tool takes 30 s


def test_the_tasks_come_from_the_class() -> None:
    rows = environment_tasks(EnvironmentConfig(use=COUNTER), "eval")
    assert [row["target"] for row in rows] == [100, 101, 102]
    with pytest.raises(TaskEnvironmentError, match=r"give data.path .*tasks\(split\)"):
        environment_tasks(EnvironmentConfig(use=f"tools:{FILE}:Attribute"), "train")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (f"{FILE}:NoReset", "no method reset"),
        (f"{FILE}:NoTool", "no public method"),
        (f"{FILE}:Missing", "has no function 'Missing'"),
        ("/nowhere.py:Class", "there is no file"),
        (f"{FILE}:Counter?turns=3", "no option turns; it has max_turns"),
        (f"{FILE}:Counter?max_turns=0", "at least 1"),
    ],
)
def test_a_class_that_cannot_be_played_is_refused(name: str, fault: str) -> None:
    with pytest.raises(TaskEnvironmentError, match=fault):
        open_environment(EnvironmentLine.read(f"tools:{name}"))


def test_schemes_and_packages_that_are_missing_are_named() -> None:
    with pytest.raises(TaskEnvironmentError, match="no environment scheme 'foo'.*reasoning-gym, tools"):
        environment_agent(EnvironmentConfig(use="foo:bar"))
    with pytest.raises(TaskEnvironmentError, match="pip install textarena, or name an interpreter"):
        environment_agent(EnvironmentConfig(use="textarena:GuessTheNumber-v0"))
    with pytest.raises(TaskEnvironmentError, match="cannot start environment.python /nowhere"):
        environment_tasks(EnvironmentConfig(use=COUNTER, python="/nowhere"), "train")
