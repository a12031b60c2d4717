"""Agents for the tests of endpoints; each plays one task with the real OpenAI client."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from areal_agents import Episode
from areal_agents.rewards import FinishedEpisode


async def agent(task: dict[str, Any], ep: Episode) -> float:
    """Send a request, and a second one that is streamed; score 1 if both replies are the same."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    messages: Any = [{"role": "user", "content": task["question"]}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
    again = ""
    async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
        assert chunk.choices, "the usage alone, which was not asked for"
        again += chunk.choices[0].delta.content or ""
    return float(again == reply.choices[0].message.content)


async def asks_once(task: dict[str, Any], ep: Episode) -> float:
    """Send one request."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
    return 1.0


async def asks_thrice(task: dict[str, Any], ep: Episode) -> float:
    """Send three requests."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    for _ in range(3):
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
    return 1.0


async def streams_thrice(task: dict[str, Any], ep: Episode) -> float:
    """Send three streamed requests."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    messages: Any = [{"role": "user", "content": "Hi"}]
    for _ in range(3):
        async for _chunk in await client.chat.completions.create(
            model="policy", messages=messages, stream=True
        ):
            pass
    return 1.0


SEARCH: Any = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {}}}},
}
OPEN: Any = {**SEARCH, "function": {**SEARCH["function"], "name": "open"}}


async def branching_agent(task: dict[str, Any], ep: Episode) -> float:
    """Continue one reply twice, and once more with another tool; the score is the number in the task."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)

    async def ask(messages: list[Any], tool: Any) -> list[Any]:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[tool])
        return [*messages, reply.choices[0].message.model_dump(exclude_none=True)]

    asked = await ask([{"role": "user", "content": task["question"]}], SEARCH)
    for question, tool in (("Sure?", SEARCH), ("Why?", SEARCH), ("Sure?", OPEN)):
        await ask([*asked, {"role": "user", "content": question}], tool)
    return float(task["question"][-2])


async def responses_agent(task: dict[str, Any], ep: Episode) -> float:
    """Send a request to an API other than chat completions."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    await client.responses.create(model="policy", input="Hi")
    return 1.0


def told(episode: FinishedEpisode) -> float:
    """The number of messages of the last conversation."""
    return float(len(episode.messages))
