"""Servers of OpenEnv, made with the real package, through the running proxy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from environment_support import REQUEST_S, Heard, handle, played, tasks
from integration_support import Stack

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.environments.started_server import StartedServer
from areal_agents.errors import AgentError, TaskEnvironmentError
from areal_agents.rollout.agents.environment_agent import environment_agent
from areal_agents.testing import ScriptedCall
from integrations.conversations import call

pytestmark = pytest.mark.environments

FILE = Path(__file__).parent / "example_openenv.py"


def command(kind: str, python: str) -> str:
    return f"{python} {FILE} {kind} {{port}}"


def all_played(
    stack: Stack, use: str, python: str, episodes: Sequence[tuple[Mapping[str, Any], Heard]]
) -> list[Any]:
    """Play episodes one after another on one server, and return their rewards or exceptions."""

    async def play() -> list[Any]:
        agent = environment_agent(EnvironmentConfig(use=use, python=python))
        try:
            async with asyncio.timeout(REQUEST_S):
                return [
                    (await asyncio.gather(agent.run(task, handle(stack, said)), return_exceptions=True))[0]
                    for task, said in episodes
                ]
        finally:
            await agent.close()

    return asyncio.run(play())


def test_a_server_is_started_played_with_text_and_ended(stack: Stack, python: str) -> None:
    use = f"openenv:{command('words', python)}?size=3&held_out=2&max_turns=3&letters=bca"
    assert [row["seed"] for row in tasks(use, python)] == [0, 1, 2]
    right, wrong = Heard("c", "raise", "b"), Heard("c", "c", "c")
    row = {"id": "1", "seed": 1, "letters": "xyz"}  # options of the line override fields of the row
    episodes = [({"seed": 0}, right), ({"seed": 0}, wrong), (row, Heard("c"))]
    assert all_played(stack, use, python, episodes) == [0.75, -0.75, 1.0]
    assert "Guess one of bca." in right.prompts[0] and "Wrong." in right.news[1]
    assert "that is no word" in right.news[2]
    # The limit applies to the reset as well, which must succeed.
    [end] = all_played(stack, f"{use}&step_timeout_s=10", python, [({"seed": 2}, Heard("sleep"))])
    assert isinstance(end, AgentError) and "no answer to step within 10 s" in str(end)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(FILE) in " ".join(p.info["cmdline"] or [])]


def test_an_action_with_several_fields_becomes_the_arguments_of_a_tool(stack: Stack, python: str) -> None:
    use = f"openenv:{command('line', python)}?max_turns=2&unrewarded=-1&instructions=Go%20to%203."
    there = Heard(call("act", '{"steps": "many"}') + call("act", '{"steps": 3}'))
    too_short = Heard(call("act", '{"steps": 3, "to_the_left": true}'), "I am there.")
    first, second = all_played(stack, use, python, [({"seed": 0}, there), ({"seed": 0}, too_short)])
    assert first == 0.5 and second == -1.0
    assert "Go to 3.\n\nYou are at 0." in there.prompts[0]
    assert "Move on the line." in there.prompts[0] and '"metadata"' not in there.prompts[0]
    assert "You are at -3." in too_short.news[1]


def test_tools_of_a_server_are_called_and_episodes_wait_for_free_sessions(stack: Stack, python: str) -> None:
    """The server is named by its URL. It allows two sessions, and three episodes use it."""

    async def play() -> None:
        server = await StartedServer.start(command("notes", python), ready_path="/health")
        agent = environment_agent(EnvironmentConfig(use=f"openenv:{server.url}", python=python))
        try:
            async with asyncio.timeout(REQUEST_S):
                prompts: list[str] = []

                def takes_two(asked: ScriptedCall) -> str:
                    prompts.append(asked.prompt_text)
                    return call("note", '{"text": "b"}' if "There are" in prompts[-1] else '{"text": "a"}')

                ep = handle(stack, takes_two)
                assert await asyncio.gather(*(agent.run({"seed": n}, ep) for n in range(3))) == [1.0] * 3
                assert len(prompts) == 6
                assert "Write a note." in prompts[0] and "Write a note about b." in prompts[0]
                unknown = Heard(call("note", '{"words": "a"}'), "Done.")
                assert await agent.run({"seed": 0}, handle(stack, unknown)) == 0.0
                assert "Error:" in unknown.news[1]
        finally:
            await agent.close()
            await server.end()

    asyncio.run(play())


def test_an_invalid_message_of_the_server_fails_the_episode(stack: Stack, python: str) -> None:
    lies = {
        "nonsense": "step failed: JSONDecodeError",
        "nan": "a reward must be finite, got nan",
        "list": "an observation must be an object",
        "done": "an observation must be an object, and done true or false",
        "endless": "step failed: ConnectionClosedError",
        "truth": "gave no reward in this episode",
        "silence": "no answer to step within 10 s",
    }
    use = f"openenv:{command('liar', python)}?max_turns=1"
    *given, silence = [({"seed": 0}, Heard(lie)) for lie in lies]
    ends = all_played(stack, use, python, given)
    # The limit applies to the reset as well, which must succeed.
    ends += all_played(stack, f"{use}&step_timeout_s=10", python, [silence])
    for end, fault in zip(ends, lies.values(), strict=True):
        assert isinstance(end, AgentError) and fault in str(end)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("{python} {file} nothing {{port}}", "ended with status 1: there is no kind nothing"),
        ("no-such-program", "cannot start no-such-program: No such file"),
        ("http://127.0.0.1:9", "describes no actions at http://127.0.0.1:9/schema: ConnectError"),
    ],
)
def test_a_server_that_cannot_be_reached_is_reported_with_the_reason(
    name: str, fault: str, stack: Stack, python: str
) -> None:
    with pytest.raises((AgentError, TaskEnvironmentError), match=re.escape(fault)):
        use = "openenv:" + name.format(python=python, file=FILE)
        played(stack, use, {"seed": 0}, Heard(), python=python)
