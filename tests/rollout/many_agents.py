"""An agent that waits in the middle of its episode until a file signals that every episode has begun."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from areal_agents import Episode, current_key, episode

_AT_ONCE = 64  # concurrent calls of a process, so that its HTTP client need not queue thousands


class _Shared:
    """What all episodes of a process share; the first of them creates it in the event loop."""

    client: AsyncOpenAI
    calls: asyncio.Semaphore
    go: asyncio.Task[None] | None = None


async def _exists(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.2)


async def _ask(messages: list[Any]) -> str:
    async with _Shared.calls:
        answer = await _Shared.client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content or ""


@episode
async def waits_for_all(task: dict, ep: Episode) -> float:
    """Make one call, wait until the file of the task exists, and make another call."""
    if _Shared.go is None:
        base_url = f"{ep.base_url.split('/e/')[0]}/v1"
        _Shared.client = AsyncOpenAI(base_url=base_url, api_key=current_key, max_retries=5)
        _Shared.calls = asyncio.Semaphore(_AT_ONCE)
        _Shared.go = asyncio.create_task(_exists(Path(task["go"])))
    messages: list[Any] = [{"role": "user", "content": task["text"]}]
    messages.append({"role": "assistant", "content": await _ask(messages)})
    await asyncio.shield(_Shared.go)
    await _ask([*messages, {"role": "user", "content": "Go on."}])
    return float(task["n"] % 2)
