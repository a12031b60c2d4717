"""Tasks, and an agent whose model calls and tools take random times; some of the calls are concurrent."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from areal_agents import Episode, episode

HTTP = DefaultAsyncHttpxClient(timeout=120)
LONGEST_S = 0.04
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def tasks() -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "question": f"What is the {i}th thing? " * (1 + i % 4)} for i in range(12)]


async def some_time() -> None:
    await asyncio.sleep(os.urandom(1)[0] / 256 * LONGEST_S)


@episode
async def agent(task: dict[str, Any], ep: Episode) -> float:
    """Take two turns, each with two concurrent helper calls; the reward is computed from the replies."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)

    async def ask(messages: list[Any], most: int) -> Any:
        await some_time()
        answer = await client.chat.completions.create(
            model="m", messages=messages, tools=[SEARCH], max_tokens=most
        )
        return answer.choices[0].message

    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    said = ""
    for _ in range(2):
        beside = [[{"role": "user", "content": f"side {i}: {task['question']}"}] for i in range(2)]
        reply, *helped = await asyncio.gather(ask(messages, 24), *(ask(side, 8) for side in beside))
        said += "".join(json.dumps(m.model_dump(include={"content"})) for m in (reply, *helped))
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls or ():
            await some_time()
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"found {len(said)}"})
        if not reply.tool_calls:
            messages.append({"role": "user", "content": f"go on: {len(said)}"})
    return sum(map(ord, said)) % 97 / 97
