"""The agents that play where an environment has none: one answer, tools, or a game in text."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from areal_agents.direct_http import direct_openai_client
from areal_agents.episode import Episode
from areal_agents.errors import TaskEnvironmentError

Message = dict[str, Any]

_OPENINGS = ("prompt", "messages", "question", "instruction", "input")


class Model:
    """The served model, as a player calls it; the connections are shared by all episodes."""

    def __init__(self) -> None:
        self._client: Any = None

    async def reply(
        self, ep: Episode, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Message:
        """Return the model's reply as a message of the chat API, ready to be sent back with the next call."""
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        client = self._connected().with_options(base_url=ep.base_url, api_key=ep.api_key)
        answer = await client.chat.completions.create(
            model="policy", messages=cast(Any, list(messages)), stream=False, **options
        )
        return answer.choices[0].message.model_dump(exclude_none=True)

    async def respond(self, ep: Episode, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return a response of the Responses API to these parameters, whatever model they name."""
        client = self._connected().with_options(base_url=ep.base_url, api_key=ep.api_key)
        answer = await client.responses.create(**{**parameters, "model": "policy", "stream": False})
        return answer.model_dump(mode="json")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    def _connected(self) -> Any:
        if self._client is None:
            try:
                self._client = direct_openai_client()
            except ImportError as error:
                raise TaskEnvironmentError(
                    "an environment is played by the client of openai, which this Python cannot import "
                    f"({error}): pip install openai"
                ) from error
        return self._client


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call.

    Attributes:
        name: its name.
        call: called with the arguments; returns the result that the model reads.
        description: what it does.
        parameters: the JSON schema of its arguments.
    """

    name: str
    call: Callable[[dict[str, Any]], Awaitable[str]]
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def schema(self) -> dict[str, Any]:
        """Return the tool as the chat API names it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


async def play_with_tools(
    model: Model,
    ep: Episode,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    *,
    max_turns: int,
    is_over: Callable[[], bool] = lambda: False,
) -> str:
    """Let the model call tools until it answers without a call, and return that answer.

    An error of a tool, or a call that cannot be read, is a result that the model reads. After `max_turns`
    calls of the model, or when a tool has ended the environment, so that `is_over`, the answer is "".
    """
    conversation = list(messages)
    schemas = [tool.schema() for tool in tools]
    by_name = {tool.name: tool for tool in tools}
    for _ in range(max_turns):
        reply = await model.reply(ep, conversation, schemas)
        conversation.append(reply)
        calls = reply.get("tool_calls") or []
        if not calls:
            return reply.get("content") or ""
        for call in calls:
            result = await _called(by_name, call["function"])
            conversation.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if is_over():
                return ""
    return ""


async def _called(tools: Mapping[str, Tool], function: Mapping[str, Any]) -> str:
    tool = tools.get(function["name"])
    if tool is None:
        return f"Error: there is no tool {function['name']!r}; there are {', '.join(tools) or 'none'}."
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"Error: the arguments are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return "Error: the arguments must be a JSON object."
    try:
        return await tool.call(arguments)
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}"


async def play_text_game(
    model: Model,
    ep: Episode,
    opening: Sequence[Message],
    step: Callable[[str], Awaitable[str | None]],
    *,
    max_turns: int,
) -> None:
    """Let the model play: each of its replies is a move, for which `step` returns what it reads next.

    Args:
        model: the served model.
        ep: the episode.
        opening: the messages that the model reads first.
        step: makes a move; returns None when the game is over.
        max_turns: the largest number of moves.
    """
    messages = list(opening)
    for _ in range(max_turns):
        reply = await model.reply(ep, messages)
        observation = await step(reply.get("content") or "")
        if observation is None:
            return
        messages += [reply, {"role": "user", "content": observation or "(nothing new)"}]


def opening_messages(task: Mapping[str, Any], addition: str = "") -> list[Message]:
    """Return the messages that a row of data begins a conversation with.

    A row has them under `prompt` or `messages`, or has one string under `prompt`, `question`, `instruction`
    or `input`. The addition is put at the end of the last message if
    that is a user's, and else is a message of its own.

    Raises:
        TaskEnvironmentError: the row has none of these, and there is no addition.
    """
    given = next((task[key] for key in _OPENINGS if task.get(key)), "")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}] if given else []
    if not isinstance(given, list) or not all(isinstance(message, Mapping) for message in given):
        raise TaskEnvironmentError(
            f"the task {task.get('id', '')} begins with {given!r}; expected a string or a list of messages"
        )
    messages = [dict(message) for message in given]
    if addition:
        if messages and messages[-1].get("role") == "user" and isinstance(messages[-1].get("content"), str):
            messages[-1]["content"] += addition if not messages[-1]["content"] else "\n\n" + addition
        else:
            messages.append({"role": "user", "content": addition})
    if not messages:
        raise TaskEnvironmentError(
            f"the task {task.get('id', '')} has no {', '.join(_OPENINGS)} to begin with"
        )
    return messages
