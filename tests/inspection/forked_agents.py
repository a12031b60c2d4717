"""Agents for the tests of forks. Their search tool returns another result at each call."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from openai import AsyncOpenAI, OpenAI
from replayed_agents import SEARCH

from areal_agents import Episode


def search(task: dict[str, Any]) -> str:
    """Return a search result, and append a line to a file."""
    with open(task["ran"], "a") as file:
        file.write("search\n")
    return f"In France, says source {secrets.token_hex(4)}"


def scored(text: str | None) -> float:
    return float("a" in (text or ""))


async def play(task: dict[str, Any], ep: Episode, messages: list[Any], *, repeats: bool) -> float:
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0)
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[SEARCH])
        reply = answer.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return scored(reply.content)
        for call in reply.tool_calls:
            result = ep.recorded_result(call.id) if repeats else None
            content = search(task) if result is None else result
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return 0.0


def asked(task: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": task["question"]}]


async def agent(task: dict[str, Any], ep: Episode) -> float:
    """Uses recorded results of tools where there are any."""
    return await play(task, ep, asked(task), repeats=True)


async def searches_again(task: dict[str, Any], ep: Episode) -> float:
    return await play(task, ep, asked(task), repeats=False)


async def restores(task: dict[str, Any], ep: Episode) -> float:
    """Restores the messages before the fork by itself, without repeating the calls."""
    messages = asked(task) if ep.fork is None else [dict(message) for message in ep.fork.messages]
    return await play(task, ep, messages, repeats=False)


async def stops(task: dict[str, Any], ep: Episode) -> float:
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0)
    await client.chat.completions.create(model="policy", messages=asked(task), tools=[SEARCH])
    return 1.0


async def other_tools(task: dict[str, Any], ep: Episode) -> float:
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0)
    answer = await client.chat.completions.create(model="policy", messages=asked(task))
    return scored(answer.choices[0].message.content)


def synchronous(task: dict[str, Any], ep: Episode) -> float:
    """Runs in a worker process, and streams."""
    client = OpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0)
    messages = asked(task)
    for _ in range(3):
        with client.chat.completions.stream(model="policy", messages=messages, tools=[SEARCH]) as stream:
            # get_final_completion() would raise for a reply that the length limit cut off.
            reply = stream.until_done().current_completion_snapshot.choices[0].message
        messages.append(reply.to_dict())
        if not reply.tool_calls:
            return scored(reply.content)
        for call in reply.tool_calls:
            result = ep.recorded_result(call.id)
            content = search(task) if result is None else result
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return 0.0


async def two_at_once(task: dict[str, Any], ep: Episode) -> float:
    """Sends two requests at the same time."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0)

    async def ask(question: str) -> str:
        messages: Any = [{"role": "user", "content": question}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return answer.choices[0].message.content or ""

    questions = ("Where is Lyon?", "Where is Nice?")
    return float(len(await asyncio.gather(*map(ask, questions))))
