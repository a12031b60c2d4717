"""Tools of a real MCP server, through the running proxy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from environment_support import Heard, played
from integration_support import Stack

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.errors import TaskEnvironmentError
from areal_agents.rollout.agents.environment_agent import environment_tasks
from integrations.conversations import call

SERVER = f"mcp:{sys.executable} {Path(__file__).parent / 'example_mcp_server.py'}"


def test_the_model_calls_the_tools_of_a_server_that_each_episode_has_for_itself(stack: Stack) -> None:
    for _ in range(2):  # a second episode has a server without notes
        said = Heard(
            call("note", '{"text": "a"}') + call("fail", "{}"), call("note", '{"text": "b"}'), "Done."
        )
        assert played(stack, SERVER, {"question": "Take notes."}, said) is None
        begin, results, second = said.news
        assert "Write a note." in begin and "Take notes." in begin
        assert "There are 1 notes." in results and "Error: Error executing tool fail" in results
        assert "There are 2 notes." in second


def test_a_server_does_not_get_the_keys_of_the_run(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tools do what the model requests, such as running a program that prints the environment."""
    monkeypatch.setenv("AREAL_AGENTS_ADMIN_KEY", "secret-of-the-run")
    monkeypatch.setenv("MINE", "variable-of-the-user")
    said = Heard(call("variables", "{}"), "Done.")
    assert played(stack, SERVER, {"question": "What do you know?"}, said) is None
    _, result = said.news
    assert "variable-of-the-user" in result and "secret-of-the-run" not in result


def test_a_server_has_no_tasks_and_a_command_must_be_readable() -> None:
    with pytest.raises(TaskEnvironmentError, match="tools and no tasks; give the tasks in data.path"):
        environment_tasks(EnvironmentConfig(use=SERVER), "train")
    with pytest.raises(TaskEnvironmentError, match="the command cannot be read"):
        environment_tasks(EnvironmentConfig(use="mcp:python 'a"), "train")
