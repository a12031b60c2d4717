"""Environments of OpenEnv: `openenv:http://host:8000`, or a command that starts one.

How the model acts is read from the server's schema of actions. Tools of an environment with tools are tools;
an action that is one string is the model's reply; any other action is the arguments of one tool, `act`. Each
episode is a session of the server. A task is what `reset` is called with: a seed, or a row of the user's
data; further options are given to `reset` with it. The reward is the sum of all rewards.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
from openenv.core import GenericEnvClient

from areal_agents.core.reward_values import checked_reward
from areal_agents.direct_http import direct_async_client
from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.players import (
    Model,
    Tool,
    opening_messages,
    play_text_game,
    play_with_tools,
)
from areal_agents.environments.schemes import SCHEMES
from areal_agents.environments.seeds import SeededTasks
from areal_agents.environments.started_server import StartedServer
from areal_agents.episode import Episode
from areal_agents.errors import AgentError, TaskEnvironmentError
from areal_agents.user_functions import describe

CONNECT_TIMEOUT_S = 60.0
CAPACITY_TIMEOUT_S = 1800.0  # longest wait in seconds for a server whose sessions are all in use
LARGEST_MESSAGE_MB = 32.0

_CAPACITY = "CAPACITY_REACHED"
_OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_NOT_SHOWN = ("done", "reward", "metadata")


def open(line: EnvironmentLine) -> OpenEnv:
    """Open a server. Raises TaskEnvironmentError if an option cannot be used."""
    return OpenEnv(line)


class OpenEnv:
    """A server of OpenEnv."""

    def __init__(self, line: EnvironmentLine) -> None:
        self._own, self._reset_with = SCHEMES["openenv"].take(line)
        self._line = line
        self._tasks = SeededTasks(line, self._own)
        self._model = Model()
        self._started: asyncio.Task[StartedServer] | None = None

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return one task for each seed."""
        return self._tasks.of(split)

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Play a session, and return the sum of its rewards."""
        url = await self._url()
        schema = await self._action_schema(url)
        given = {name: value for name, value in task.items() if name != "id"} | self._reset_with
        client = GenericEnvClient(
            url,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            message_timeout_s=self._own["step_timeout_s"],
            max_message_size_mb=LARGEST_MESSAGE_MB,
            websocket_ping_interval_s=None,  # a step that blocks the server is bounded by its time limit
        )
        try:
            session = _Session(client, self._line.text, self._own["step_timeout_s"])
            shown = await session.reset(given)
            instructions = "\n\n".join(part for part in (self._own["instructions"], shown) if part)
            messages = opening_messages(task, instructions)
            field = None if _has_tools(schema) else _text_field(schema)
            if not session.is_over and field is not None:

                async def step(text: str) -> str | None:
                    observation = await session.step({field: text})
                    return None if session.is_over else _shown(observation)

                await play_text_game(self._model, ep, messages, step, max_turns=self._own["max_turns"])
            elif not session.is_over:
                tools = await session.tools() if _has_tools(schema) else [_act(session, schema)]
                await play_with_tools(
                    self._model,
                    ep,
                    messages,
                    tools,
                    max_turns=self._own["max_turns"],
                    is_over=lambda: session.is_over,
                )
            return self._reward(session)
        finally:
            await client.close()

    async def close(self) -> None:
        """Close the connections to the model, and end the server if it was started here."""
        await self._model.close()
        started, self._started = self._started, None
        if started is not None:
            started.cancel()
            await asyncio.wait({started})
            if not started.cancelled() and started.exception() is None:
                await started.result().end()

    def _reward(self, session: _Session) -> float:
        session.raise_fault()
        if session.reward is not None:
            return session.reward
        if self._own["unrewarded"] is not None:
            return checked_reward(self._own["unrewarded"])  # type: ignore[return-value]
        raise TaskEnvironmentError(
            f"{self._line.text!r} gave no reward in this episode; if that is worth a reward, say which: "
            "unrewarded=0"
        )

    async def _url(self) -> str:
        """Return the URL of the server; start it if it is not running."""
        if self._line.name.startswith(("http://", "https://")):
            return self._line.name
        if self._started is None or _has_failed(self._started):
            self._started = asyncio.create_task(StartedServer.start(self._line.name, ready_path="/health"))
        return (await asyncio.shield(self._started)).url

    async def _action_schema(self, url: str) -> dict[str, Any]:
        try:
            async with (
                direct_async_client(timeout_s=CONNECT_TIMEOUT_S) as http,
                asyncio.timeout(CONNECT_TIMEOUT_S),
            ):
                answer = await http.get(f"{url.rstrip('/')}/schema")
                answer.raise_for_status()
                schema = answer.json()["action"]
        except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise TaskEnvironmentError(
                f"{self._line.text!r} describes no actions at {url}/schema: {describe(error)}"
            ) from error
        if not isinstance(schema, dict):
            raise TaskEnvironmentError(f"{self._line.text!r}: the schema of actions is {schema!r}")
        return schema


class _Session:
    """A session of a server: what it has rewarded, and whether it is over."""

    def __init__(self, client: Any, name: str, timeout_s: float) -> None:
        self._client, self._name, self._timeout_s = client, name, timeout_s
        self.reward: float | None = None
        self.is_over = False
        self._fault: TaskEnvironmentError | None = None

    async def reset(self, given: Mapping[str, Any]) -> str:
        """Begin, and return what the model reads; wait if the server has no more sessions."""
        deadline = asyncio.get_running_loop().time() + CAPACITY_TIMEOUT_S
        while True:
            try:
                await self._client.connect()
                return _shown(self._noted(await self._client.reset(**given)))
            except Exception as error:
                if _CAPACITY not in str(error) or asyncio.get_running_loop().time() > deadline:
                    raise self._translated("reset", error) from error
            await self._client.disconnect()
            await asyncio.sleep(0.5)

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Act, and return the observation. An error about the action is an observation, too."""
        try:
            return self._noted(await self._client.step(dict(action)))
        except Exception as error:
            if isinstance(error, RuntimeError) and any(code in str(error) for code in _OF_THE_ACTION):
                return {"error": str(error)}
            self._fault = self._translated("step", error)
            self.is_over = True
            raise self._fault from error

    async def tools(self) -> list[Tool]:
        """Return the tools of the environment."""
        try:
            listed = (await self._client.step({"type": "list_tools"})).observation["tools"]
            return [
                Tool(tool["name"], self._calling(tool["name"]), tool["description"], tool["input_schema"])
                for tool in listed
            ]
        except Exception as error:
            raise self._translated("list_tools", error) from error

    def raise_fault(self) -> None:
        """Raise what ended the session too early, which the player may have taken for a result."""
        if self._fault is not None:
            raise self._fault

    def _calling(self, name: str) -> Any:
        async def call(arguments: dict[str, Any]) -> str:
            observation = await self.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
            if observation.get("error"):
                error = observation["error"]
                return f"Error: {error['message'] if isinstance(error, dict) else error}"
            return _result(observation.get("result"))

        return call

    def _noted(self, result: Any) -> dict[str, Any]:
        """Note the reward and the end that a result tells, and return its observation."""
        if not isinstance(result.observation, dict) or type(result.done) is not bool:
            raise TypeError(f"an observation must be an object, and done true or false, got {result!r:.200}")
        if result.reward is not None:
            self.reward = (self.reward or 0.0) + checked_reward(result.reward)  # type: ignore[operator]
        self.is_over = result.done
        return result.observation

    def _translated(self, what: str, error: Exception) -> TaskEnvironmentError:
        if isinstance(error, TimeoutError):
            return TaskEnvironmentError(f"{self._name}: no answer to {what} within {self._timeout_s:g} s")
        said = str(error) if isinstance(error, AgentError) else describe(error)
        return TaskEnvironmentError(f"{self._name}: {what} failed: {said}")


def _has_failed(started: asyncio.Task[StartedServer]) -> bool:
    if not started.done():
        return False
    return started.cancelled() or started.exception() is not None or started.result().has_ended


def _own_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: field for name, field in (schema.get("properties") or {}).items() if name != "metadata"}


def _has_tools(schema: Mapping[str, Any]) -> bool:
    """Whether the actions are OpenEnv's own, to list tools and to call one."""
    fields = _own_fields(schema)
    return not fields or fields.get("type", {}).get("const") in ("list_tools", "call_tool")


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the name of the only field of an action if it is a string."""
    fields = _own_fields(schema)
    required = [name for name in schema.get("required", ()) if name in fields]
    named = required or list(fields)
    return named[0] if len(named) == 1 and fields[named[0]].get("type") == "string" else None


def _act(session: _Session, schema: Mapping[str, Any]) -> Tool:
    """Return a tool whose arguments are an action."""
    parameters = {**schema, "properties": _own_fields(schema)}

    async def call(arguments: dict[str, Any]) -> str:
        return _shown(await session.step(arguments))

    return Tool("act", call, schema.get("description") or "Act in the environment.", parameters)


def _shown(observation: Mapping[str, Any]) -> str:
    """Return what the model reads of an observation: its only string, or JSON."""
    shown = {
        name: value for name, value in observation.items() if name not in _NOT_SHOWN and value is not None
    }
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return json.dumps(shown, ensure_ascii=False) if shown else ""


def _result(result: Any) -> str:
    """Return what the model reads of a tool's result, in the forms of MCP and of plain values."""
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        texts = [part.get("text") for part in result["content"] if isinstance(part, Mapping)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
