"""Agents that ask the model one question."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI

from areal_agents.episode import Episode


async def ask(task: dict[str, Any], ep: Episode) -> None:
    async with AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        await client.chat.completions.create(model="policy", messages=messages)


async def ask_twice(task: dict[str, Any], ep: Episode) -> None:
    await ask(task, ep)
    await ask(task, ep)


async def ask_and_insist(task: dict[str, Any], ep: Episode) -> float:
    """Raises ValueError if the reply is empty, and returns its own reward."""
    async with AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        reply = await client.chat.completions.create(model="policy", messages=messages)
    said = reply.choices[0].message.content
    if not said:
        raise ValueError("the model said nothing")
    return float(said == task["answer"])


async def ask_and_wait(task: dict[str, Any], ep: Episode) -> None:
    await ask(task, ep)
    await asyncio.Event().wait()
