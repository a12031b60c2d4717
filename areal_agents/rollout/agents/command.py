"""Runs an agent that is a program in any language, as one process per episode.

The program gets its task as JSON on standard input and in AREAL_AGENTS_TASK, finds the model through the
environment variables of the OpenAI and Anthropic SDKs, has the other variables of this process except its
secrets, and posts its reward over HTTP with the episode's key:
POST <base>/episodes/$AREAL_AGENTS_EPISODE_ID/reward. A proxy on this machine or a private network is added to
its NO_PROXY. Exit status 0 is success. The episode ends when the program exits; the processes that it leaves
running, also in other sessions, are killed. What it writes to its standard output and standard error is in
the log of its episode, of which the newest are kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_agents.direct_http import bypassing_proxies
from areal_agents.episode import EPISODE_ID_VARIABLE, Episode
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.agent_process import ChildProcess
from areal_agents.rollout.agents.episode_logs import EpisodeLogs
from areal_agents.secret_variables import without_password

TASK_VARIABLE = "AREAL_AGENTS_TASK"
# Linux limits a variable to 128 KiB; a longer task is on standard input only.
LONGEST_VARIABLE = 120_000


class CommandAgent:
    """Runs a command for each episode."""

    capacity: int | None = None
    must_reward = False

    def __init__(
        self, command: Sequence[str], *, logs: Path | None = None, passed: Collection[str] = ()
    ) -> None:
        """Args:
        command: the program and its arguments.
        logs: a folder for the output of the newest episodes; None: it is discarded.
        passed: (PGPASSWORD,) if the program gets the password of the store, else empty.
        """
        if not command:
            raise AgentError("the agent's command is empty")
        self._command = tuple(command)
        self._logs = EpisodeLogs(logs)
        self._passed = tuple(passed)

    async def run(self, task: Mapping[str, Any], ep: Episode) -> None:
        """Run one episode. Raises AgentError, with the end of standard error, if the exit status is not 0."""
        text = json.dumps(dict(task))
        inherited = without_password(os.environ, passed=self._passed)
        with self._logs.opened(ep.id) as log:
            try:
                process = await ChildProcess.start(
                    self._command,
                    environment={**bypassing_proxies(inherited, ep.base_url), **command_variables(text, ep)},
                    tail=True,
                    log=log,
                )
            except OSError as error:
                raise AgentError(f"cannot start {self._command[0]!r}: {error.strerror}") from error
            try:
                process.send(text.encode())
                process.close_input()
                status = await process.wait()
            finally:
                await process.end()  # also ends the processes that it left running
        if status != 0:
            raise AgentError(f"{self._command[0]} exited with status {status}: {process.tail()}")

    async def close(self) -> None:
        """Do nothing: no process outlives its episode."""


def command_variables(task: str, ep: Episode) -> dict[str, str]:
    """Return the variables by which a program finds its task, the model and its episode.

    Args:
        task: the task as JSON.
    """
    variables = {
        "OPENAI_BASE_URL": ep.base_url,
        "OPENAI_API_BASE": ep.base_url,  # older clients read this one
        "OPENAI_API_KEY": ep.api_key,
        "ANTHROPIC_BASE_URL": ep.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": ep.api_key,
        "GOOGLE_GEMINI_BASE_URL": ep.base_url.removesuffix("/v1"),
        "GEMINI_API_KEY": ep.api_key,
        EPISODE_ID_VARIABLE: ep.id,
    }
    return {**variables, TASK_VARIABLE: task} if len(task) <= LONGEST_VARIABLE else variables
