"""Agents for the replay tests: the agent that was recorded, and changed versions of it."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from areal_agents import Episode

SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


async def play(task: dict[str, Any], ep: Episode, result: str, *, calls: int = 2) -> float:
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0)
    messages: Any = [{"role": "user", "content": task["question"]}]
    content = ""
    for _ in range(calls):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[SEARCH])
        message = reply.choices[0].message
        content = message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return float("Lyon" in content)


async def agent(task: dict[str, Any], ep: Episode) -> float:
    return await play(task, ep, "In France")


async def other_result(task: dict[str, Any], ep: Episode) -> float:
    return await play(task, ep, "In Europe")


async def other_reward(task: dict[str, Any], ep: Episode) -> float:
    return 0.5 * await play(task, ep, "In France")


async def fewer_calls(task: dict[str, Any], ep: Episode) -> float:
    return await play(task, ep, "In France", calls=1)


async def more_calls(task: dict[str, Any], ep: Episode) -> float:
    return await play(task, ep, "In France", calls=3)


async def crashes(task: dict[str, Any], ep: Episode) -> float:
    await play(task, ep, "In France")
    raise KeyError("a changed tool")


async def other_question(task: dict[str, Any], ep: Episode) -> float:
    """Asks another question."""
    return await play({**task, "question": "Where is Nice?"}, ep, "In France")
