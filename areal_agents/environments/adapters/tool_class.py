"""A class whose public methods are the model's tools: `tools:my_environment.py:Search?max_turns=8`.

It is the form of TRL's `environment_factory`. For each episode an object is made without arguments and
`reset(**row)` is called with the task; a string that `reset` returns is added to the last user message. Then
the model calls the public methods until it answers without a call. The reward is what `get_reward()` returns,
or the attribute `reward`. Type hints and docstrings describe the tools to the model. The tasks are the ones
of `data`, or what a static method `tasks(split)` returns. Methods may be async.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import docstring_parser
from pydantic import PydanticUserError, TypeAdapter, validate_call

from areal_agents.core.reward_values import checked_reward
from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.own_thread import OwnThread
from areal_agents.environments.players import Model, Tool, opening_messages, play_with_tools
from areal_agents.environments.schemes import SCHEMES
from areal_agents.episode import Episode
from areal_agents.errors import TaskEnvironmentError
from areal_agents.user_functions import describe, load_function

_NO_TOOLS = {"reset", "tasks", "close", "get_reward"}


def open(line: EnvironmentLine) -> ToolClass:
    """Load a class. Raises TaskEnvironmentError if it cannot be loaded or has no reset, reward or tool."""
    return ToolClass(line)


class ToolClass:
    """A user's class of environments, one object for each episode."""

    def __init__(self, line: EnvironmentLine) -> None:
        own, _ = SCHEMES["tools"].take(line)
        self._line, self._max_turns = line, own["max_turns"]
        self._make = load_function(line.name, TaskEnvironmentError)
        self._model = Model()
        if not callable(getattr(self._make, "reset", None)):
            raise TaskEnvironmentError(f"{line.name} has no method reset(**row), which begins an episode")
        if not _tools_of(self._make):
            raise TaskEnvironmentError(f"{line.name} has no public method beside reset that could be a tool")

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return what the class's `tasks(split)` returns."""
        given = getattr(self._make, "tasks", None)
        if given is None:
            raise TaskEnvironmentError(
                f"{self._line.text!r} has no tasks of its own: give data.path (and eval.data.path), or a "
                "static method tasks(split) that returns a list of dicts"
            )
        try:
            return [dict(row) for row in given(split)]
        except Exception as error:
            raise TaskEnvironmentError(f"{self._line.name}.tasks raised {describe(error)}") from error

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Let the model call the methods of a new object until it answers; return the object's reward."""
        thread, environment = OwnThread(f"environment of episode {ep.id}"), None
        try:
            environment = await _call(thread, self._make)
            addition = await _call(thread, environment.reset, **task)
            tools = [_tool(thread, name, method) for name, method in _tools_of(environment).items()]
            messages = opening_messages(task, addition if isinstance(addition, str) else "")
            await play_with_tools(self._model, ep, messages, tools, max_turns=self._max_turns)
            return await self._reward(thread, environment)
        finally:
            end = getattr(environment, "close", None)
            is_async = inspect.iscoroutinefunction(end)
            thread.close(None if is_async else end)  # not waited for: a tool may never return
            if is_async and end is not None:
                await end()

    async def _reward(self, thread: OwnThread, environment: Any) -> float:
        if callable(getattr(environment, "get_reward", None)):
            value = await _call(thread, environment.get_reward)
        elif hasattr(environment, "reward"):
            value = environment.reward
        else:
            raise TaskEnvironmentError(
                f"{self._line.name} has neither get_reward() nor, after an episode, an attribute reward"
            )
        reward = checked_reward(value)
        return sum(reward.values()) if isinstance(reward, dict) else reward

    async def close(self) -> None:
        """Close the connections to the model."""
        await self._model.close()


def _tools_of(owner: Any) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class or an object, by name, without those with a role of their own."""
    kind = owner if inspect.isclass(owner) else type(owner)
    names = [
        name
        for name, member in inspect.getmembers_static(kind, _is_method)
        if not name.startswith("_") and name not in _NO_TOOLS
    ]
    return {name: getattr(owner, name) for name in names}


def _is_method(member: Any) -> bool:
    return inspect.isfunction(member) or isinstance(member, staticmethod | classmethod)


def _tool(thread: OwnThread, name: str, method: Callable[..., Any]) -> Tool:
    """Describe a method to the model by its type hints and docstring, and check arguments by the hints."""
    try:
        schema = TypeAdapter(cast(Any, method)).json_schema()
        checked = validate_call(method)
    except (NameError, PydanticUserError) as error:
        raise TaskEnvironmentError(f"the method {name} cannot be described to the model: {error}") from error
    described = docstring_parser.parse(inspect.getdoc(method) or "")
    for parameter in described.params:
        if parameter.arg_name in schema["properties"] and parameter.description:
            schema["properties"][parameter.arg_name]["description"] = parameter.description

    async def call(arguments: dict[str, Any]) -> str:
        result = await (
            checked(**arguments) if inspect.iscoroutinefunction(method) else thread.run(checked, **arguments)
        )
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    summary = "\n\n".join(part for part in (described.short_description, described.long_description) if part)
    return Tool(name, call, summary, schema)


async def _call(thread: OwnThread, function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call a function: an async one here, any other on the thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await thread.run(function, **arguments)
