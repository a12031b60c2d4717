"""Plays the episodes of an environment, in this process or in an interpreter that has its package."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from areal_agents.core.rollout import DATA_SOURCE
from areal_agents.direct_http import bypassing_proxies
from areal_agents.environments.config import EnvironmentConfig
from areal_agents.environments.environment import Environment, Split, open_environment
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.schemes import scheme_of
from areal_agents.episode import Episode
from areal_agents.errors import AgentError, TaskEnvironmentError
from areal_agents.rollout.agent_variables import agent_variables
from areal_agents.rollout.agents.agent_process import ChildProcess
from areal_agents.rollout.agents.coroutine import CoroutineAgent
from areal_agents.secret_variables import without_secrets

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0  # some packages import for a minute
EXIT_TIMEOUT_S = 10.0  # longest wait for a process to exit that could not open its environment
CANCEL_TIMEOUT_S = 5.0  # longest wait for an episode to end that was cancelled

_HOST = ("-m", "areal_agents.environments.host")


def environment_tasks(config: EnvironmentConfig, split: Split) -> list[dict[str, Any]]:
    """Return the tasks of a split of an environment.

    Raises:
        TaskEnvironmentError: the environment cannot be opened, or has no tasks of its own.
    """
    line = EnvironmentLine.read(config.use)
    scheme_of(line)
    if not config.python:
        return open_environment(line).tasks(split)
    try:
        done = subprocess.run(
            [config.python, *_HOST, "tasks", config.use, split],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            env={**without_secrets(os.environ), **agent_variables()},
        )
    except subprocess.TimeoutExpired as error:
        raise TaskEnvironmentError(f"{config.use!r} gave no tasks within {START_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise TaskEnvironmentError(f"cannot start environment.python {config.python}: {error}") from error
    rows = [_answer(row) for row in done.stdout.splitlines()]
    if done.returncode:
        raise TaskEnvironmentError(_fault(config, rows[-1] if rows else {}, done.returncode, done.stderr))
    return rows


def environment_agent(config: EnvironmentConfig) -> EnvironmentAgent | HostedEnvironmentAgent:
    """Return the agent that plays an environment. Raises TaskEnvironmentError if it cannot be opened here."""
    line = EnvironmentLine.read(config.use)
    rewards = scheme_of(line).rewards
    if config.python:
        return HostedEnvironmentAgent(config, must_reward=rewards)
    return EnvironmentAgent(open_environment(line), must_reward=rewards)


class EnvironmentAgent(CoroutineAgent):
    """An environment in this process."""

    def __init__(self, environment: Environment, *, must_reward: bool) -> None:
        super().__init__(environment.play)
        self._environment = environment
        self.must_reward = must_reward

    async def close(self) -> None:
        """End the episodes that are left, and the environment."""
        await super().close()
        await self._environment.close()


class MixedEnvironmentAgent:
    """Several environments, of which a task's `data_source` names one."""

    capacity: int | None = None

    def __init__(self, agents: Mapping[str, EnvironmentAgent | HostedEnvironmentAgent]) -> None:
        self._agents = dict(agents)
        self.must_reward = any(agent.must_reward for agent in self._agents.values())

    async def run(self, task: Mapping[str, Any], ep: Episode) -> Any:
        """Play one episode in the environment of the task. Raises AgentError if there is none."""
        source = task.get(DATA_SOURCE)
        if source not in self._agents:
            raise AgentError(
                f"the task has {DATA_SOURCE}: {source!r}, and there are the environments "
                f"{', '.join(self._agents)}"
            )
        own = {name: value for name, value in task.items() if name != DATA_SOURCE}
        return await self._agents[source].run(own, ep)

    async def close(self) -> None:
        """End every environment."""
        await asyncio.gather(*(agent.close() for agent in self._agents.values()))


class HostedEnvironmentAgent:
    """An environment in a process of another interpreter, which is started at the first episode.

    If the process dies, its episodes fail, and the next episode starts it again.
    """

    capacity: int | None = None

    def __init__(self, config: EnvironmentConfig, *, must_reward: bool) -> None:
        self.must_reward = must_reward
        self._config = config
        self._started: asyncio.Task[_Host] | None = None

    async def run(self, task: Mapping[str, Any], ep: Episode) -> Any:
        """Play one episode, and return its reward. Raises AgentError if the environment fails."""
        if self._started is None or _has_failed(self._started):
            self._started = asyncio.create_task(_Host.start(self._config, ep.base_url))
        # Shielded: the end of one episode is no reason to begin the start again for the others.
        host = await asyncio.shield(self._started)
        return await host.play(task, ep)

    async def close(self) -> None:
        """End the process."""
        started, self._started = self._started, None
        if started is None:
            return
        if not started.done():
            started.cancel()
        await asyncio.wait({started})
        if not started.cancelled() and started.exception() is None:
            await started.result().end()


def _has_failed(started: asyncio.Task[_Host]) -> bool:
    """Whether the process could not be started, or answers no more."""
    if not started.done():
        return False
    return started.cancelled() or started.exception() is not None or started.result().has_ended


class _Host:
    """The process that plays an environment."""

    def __init__(self, config: EnvironmentConfig, process: ChildProcess) -> None:
        self._config, self._process = config, process
        self._numbers = itertools.count()
        self._playing: dict[int, asyncio.Future[Any]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: EnvironmentConfig, base_url: str) -> _Host:
        """Start the process and wait until it is ready. Raises AgentError if it does not become so."""
        command = [config.python, *_HOST, "play", config.use]
        variables = {**bypassing_proxies(os.environ, base_url), **agent_variables()}
        try:
            process = await ChildProcess.start(command, environment=variables, lines=True, tail=True)
        except OSError as error:
            raise AgentError(f"cannot start environment.python {config.python}: {error.strerror}") from error
        host = cls(config, process)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await process.line()
        except TimeoutError as error:
            await process.end()
            raise AgentError(f"{config.use!r} was not ready within {START_TIMEOUT_S:.0f} s") from error
        except BaseException:
            await asyncio.shield(process.end())
            raise
        first = _answer(ready)
        if "ready" not in first:
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=EXIT_TIMEOUT_S)
            await process.end()
            raise AgentError(_fault(config, first, await process.wait(), process.tail()))
        host._reading = asyncio.create_task(host._read(), name=f"environment {config.use}")
        return host

    @property
    def has_ended(self) -> bool:
        """Whether the process answers no more."""
        return self._reading is None or self._reading.done()

    async def play(self, task: Mapping[str, Any], ep: Episode) -> Any:
        """Play one episode; if this is cancelled, the episode is."""
        number = next(self._numbers)
        self._playing[number] = played = asyncio.get_running_loop().create_future()
        of_episode = {"id": ep.id, "base_url": ep.base_url, "api_key": ep.api_key}
        self._send({"play": number, "task": dict(task), **of_episode})
        try:
            return await asyncio.shield(played)
        except asyncio.CancelledError:
            self._send({"cancel": number})
            if not (await asyncio.wait({played}, timeout=CANCEL_TIMEOUT_S))[0]:
                logger.error(
                    "%s did not end episode %s within %g s", self._config.use, ep.id, CANCEL_TIMEOUT_S
                )
            else:
                played.exception()  # retrieved: the episode was ended on purpose
            raise
        finally:
            self._playing.pop(number, None)

    async def end(self) -> None:
        """End the process and whatever it plays."""
        await asyncio.shield(self._process.end())
        if self._reading is not None:
            await self._reading

    def _send(self, request: Mapping[str, Any]) -> None:
        self._process.send(json.dumps(request).encode() + b"\n")

    async def _read(self) -> None:
        """Hand the answers to those who wait for them, until the process ends."""
        fault = "ended"
        try:
            while line := await self._process.line():
                answer = json.loads(line)
                played = self._playing.get(answer["played"])
                if played is None or played.done():
                    continue
                if "error" in answer:
                    played.set_exception(AgentError(answer["error"]))
                else:
                    played.set_result(answer["reward"])
        except (KeyError, ValueError) as error:  # the line is too long, or no answer
            fault = f"gave an answer that cannot be read ({error})"
        await self._process.end()  # then its last words are complete
        ended = AgentError(f"the process of {self._config.use!r} {fault}: {self._process.tail()}")
        for played in self._playing.values():
            if not played.done():
                played.set_exception(ended)


def _fault(config: EnvironmentConfig, said: Mapping[str, Any], status: int, errors: str) -> str:
    """Say why the interpreter could not open the environment.

    Args:
        config: the environment.
        said: the last answer of the process.
        status: its exit status.
        errors: the end of its standard error.
    """
    if "fault" in said:
        return str(said["fault"])
    errors = errors.strip()
    if "No module named" in errors and "areal_agents" in errors:
        return (
            f"environment.python {config.python} cannot import areal-agents ({errors.splitlines()[-1]}); "
            "install it beside the environment's package: pip install areal-agents openai docstring-parser"
        )
    return f"environment.python {config.python} ended with status {status} for {config.use!r}: {errors}"


def _answer(line: bytes | str) -> dict[str, Any]:
    """Read a line of the process; {} if it is none that the host writes."""
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
