"""An environment that runs in another interpreter."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from environment_support import Heard, handle, played
from integration_support import Stack

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.errors import AgentError, TaskEnvironmentError
from areal_agents.rollout.agents.environment_agent import HostedEnvironmentAgent, environment_tasks
from integrations.conversations import call

FILE = Path(__file__).parent / "example_environments.py"
COUNTER = f"tools:{FILE}:Counter"
TASK = {"id": "1", "question": "Count.", "target": 6}
WAIT_S = 60.0


def test_a_hosted_environment_gives_the_same_tasks_and_rewards_as_a_local_one(stack: Stack) -> None:
    here, there = EnvironmentConfig(use=COUNTER), EnvironmentConfig(use=COUNTER, python=sys.executable)
    assert environment_tasks(there, "eval") == environment_tasks(here, "eval")
    for replies in ([call("add", '{"amount": 6}'), "Done."], ["Done."]):
        rewards = [played(stack, COUNTER, TASK, replies, python=python) for python in ("", sys.executable)]
        assert rewards[0] == rewards[1]


def test_errors_name_their_cause(stack: Stack) -> None:
    with pytest.raises(AgentError, match=r"neither get_reward\(\) nor"):
        played(stack, f"tools:{FILE}:Unrewarded", {"prompt": "Go."}, ["Done."], python=sys.executable)
    for replies, fault in ((["Done."], "finite"), ([call("leave", "{}")], r"sys.exit\(4\)")):
        with pytest.raises(AgentError, match=fault):
            played(stack, f"tools:{FILE}:NotANumber", {"prompt": "Go."}, replies, python=sys.executable)
    with pytest.raises(AgentError, match="no method reset"):
        played(stack, f"tools:{FILE}:NoReset", {"prompt": "Go."}, ["Done."], python=sys.executable)
    with pytest.raises(TaskEnvironmentError, match="no method reset"):
        environment_tasks(EnvironmentConfig(use=f"tools:{FILE}:NoReset", python=sys.executable), "train")


def test_an_interpreter_without_this_package_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH\ncd /\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(TaskEnvironmentError, match="cannot import areal-agents .*pip install areal-agents"):
        environment_tasks(EnvironmentConfig(use=COUNTER, python=str(bare)), "train")


def test_a_failed_start_is_reported_with_its_exit_status_and_output(stack: Stack, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 7\n")
    broken.chmod(0o755)
    for failing in (
        lambda: environment_tasks(EnvironmentConfig(use=COUNTER, python=str(broken)), "train"),
        lambda: played(stack, COUNTER, TASK, ["Done."], python=str(broken)),
    ):
        with pytest.raises((AgentError, TaskEnvironmentError), match="status 7 for .*: no such luck"):
            failing()


def test_the_process_ends_when_its_standard_input_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_agents.environments.host", "play", COUNTER]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, '{"ready": true}\n')


def test_one_start_serves_all_episodes_that_wait_for_it(stack: Stack) -> None:
    """This holds even if the episode that began the start is cancelled."""

    async def play() -> None:
        agent = HostedEnvironmentAgent(
            EnvironmentConfig(use=COUNTER, python=sys.executable), must_reward=True
        )
        first = asyncio.create_task(agent.run(TASK, handle(stack, ["Done."])))
        await asyncio.sleep(0)
        started = agent._started
        second = asyncio.create_task(agent.run(TASK, handle(stack, ["Done."])))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == 0.0
        assert first.cancelled() and agent._started is started
        await agent.close()

    asyncio.run(asyncio.wait_for(play(), WAIT_S))


def test_episodes_play_concurrently_and_a_dead_process_is_replaced(stack: Stack) -> None:
    async def play() -> None:
        agent = HostedEnvironmentAgent(
            EnvironmentConfig(use=f"tools:{FILE}:Slow", python=sys.executable), must_reward=True
        )

        waiting = Heard(call("wait", "{}"))
        slow = asyncio.create_task(agent.run({"prompt": "Go."}, handle(stack, waiting)))
        while not waiting.prompts:
            await asyncio.sleep(0.01)
        assert (
            await agent.run({"prompt": "Go."}, handle(stack, ["Done."])) == 1.0
        )  # the slow episode does not delay others
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        with pytest.raises(AgentError, match="the process of .* ended"):
            await agent.run({"prompt": "Go."}, handle(stack, [call("die", "{}")]))
        assert await agent.run({"prompt": "Go."}, handle(stack, ["Done."])) == 1.0
        await agent.close()

    asyncio.run(asyncio.wait_for(play(), WAIT_S))
    assert not [child for child in psutil.Process().children() if _is_host(child)]


def _is_host(process: psutil.Process) -> bool:
    """Whether a process runs an environment; one that has just ended does not."""
    try:
        return "environments.host" in " ".join(process.cmdline())
    except psutil.Error:
        return False
