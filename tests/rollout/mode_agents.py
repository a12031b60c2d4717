"""One weather agent in every form in which an agent can run: the conversation is the same in all of them.

The module provides the functions; `python mode_agents.py` is the command.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI, OpenAI

from areal_agents import Episode, episode

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The forecast of a city.", "parameters": PARAMETERS}


class Talk:
    """The agent's side of the conversation, without any transport."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self.completions: list[str] = []
        self.messages: list[Any] = [
            {"role": "system", "content": "Look the forecast up before you answer."},
            {"role": "user", "content": task["question"]},
        ]

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the next call of the model."""
        tools = [{"type": "function", "function": WEATHER}]
        return {"model": "policy", "messages": self.messages, "tools": tools}

    def take(self, completion: Any) -> bool:
        """Append a reply and the results of its tools; return whether another call follows."""
        message = completion.choices[0].message
        self.completions.append(completion.id)
        self.messages.append(message)
        for call in message.tool_calls or ():
            content = f"{json.loads(call.function.arguments)['city']}: rain"
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return bool(message.tool_calls)

    def rewarded(self, ep: Episode) -> float:
        """Reward the first turn, and return the reward of the episode."""
        ep.reward(0.25, completion_id=self.completions[0], name="looked up")
        return float(self._task["answer"] in self.messages[-1].content)


async def _play(client: AsyncOpenAI, task: dict[str, Any], ep: Episode) -> float:
    talk = Talk(task)
    while talk.take(await client.chat.completions.create(**talk.call)):
        pass
    return talk.rewarded(ep)


def play(client: OpenAI, task: dict[str, Any], ep: Episode) -> float:
    """Play an episode with a client that blocks."""
    talk = Talk(task)
    while talk.take(client.chat.completions.create(**talk.call)):
        pass
    return talk.rewarded(ep)


@episode
async def as_coroutine(task: dict, ep: Episode) -> float:
    async with AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key) as client:
        return await _play(client, task, ep)


@episode
def in_a_worker(task: dict, ep: Episode) -> float:
    with OpenAI(base_url=ep.base_url, api_key=ep.api_key) as client:
        return play(client, task, ep)


@episode
def as_command(task: dict, ep: Episode) -> float:
    with OpenAI() as client:
        return play(client, task, ep)


if __name__ == "__main__":
    import sys

    as_command(json.load(sys.stdin))
