"""Agents for the tests, in a separate file because agents are loaded by path."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from areal_agents import Episode, current_key, episode
from areal_agents.errors import AgentLost

SHORT: dict[str, Any] = {"model": "policy", "max_tokens": 2}


async def ask(ep: Episode, text: str = "Hi") -> str:
    """Make one short model call; return the id of the completion."""
    async with AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(messages=[{"role": "user", "content": text}], **SHORT)
        return answer.id


@episode
async def good(task: dict, ep: Episode) -> float:
    await ask(ep, str(task.get("text", "Hi")))
    return float(task.get("reward", 1.0))


SHARED: list[AsyncOpenAI] = []


@episode
async def is_lost(task: dict, ep: Episode) -> float:
    await ask(ep)
    raise AgentLost("its node died")


@episode
async def shares_a_client(task: dict, ep: Episode) -> float:
    """Use one client for all episodes, as at module level; `current_key` tells the episodes apart."""
    if not SHARED:
        SHARED.append(AsyncOpenAI(base_url=f"{ep.base_url.split('/e/')[0]}/v1", api_key=current_key))
    messages: list[Any] = [{"role": "user", "content": task["text"]}]
    for _ in range(3):
        answer = await SHARED[0].chat.completions.create(messages=messages, **SHORT)
        messages += [answer.choices[0].message, {"role": "user", "content": task["text"]}]
    return 1.0


async def undecorated(task: dict, ep: Episode) -> bool:
    await ask(ep)
    return True


@episode
async def cancels_itself(task: dict, ep: Episode) -> float:
    await ask(ep)
    raise asyncio.CancelledError


async def raises(task: dict, ep: Episode) -> float:
    await ask(ep)
    raise KeyError("no such tool")


@episode
async def loses_the_connection(task: dict, ep: Episode) -> float:
    await ask(ep)
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.get("http://127.0.0.1:9/")  # the discard port, on which nothing listens
    return 1.0


@episode
async def exits(task: dict, ep: Episode) -> None:
    await ask(ep)
    sys.exit(3)


@episode
async def hangs(task: dict, ep: Episode) -> None:
    await ask(ep)
    ep.reward(0.25, name="so far")
    await asyncio.sleep(3600)


@episode
async def hangs_before_calling(task: dict, ep: Episode) -> None:
    await asyncio.sleep(3600)


@episode
async def resists(task: dict, ep: Episode) -> None:
    await ask(ep)
    ep.reward(0.25, name="so far")
    for _ in range(2):  # catches its cancellation twice, as careless agents do
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@episode
async def never_calls(task: dict, ep: Episode) -> float:
    return 1.0


@episode
async def not_a_number(task: dict, ep: Episode) -> float:
    await ask(ep)
    return math.nan


@episode
async def by_name(task: dict, ep: Episode) -> dict:
    await ask(ep)
    return {"correct": True, "style": 0.5}


@episode
async def by_turn(task: dict, ep: Episode) -> dict:
    return {await ask(ep, "one"): 0.25, await ask(ep, "two"): 0.5}


@episode
async def rewards_itself(task: dict, ep: Episode) -> None:
    completion = await ask(ep)
    ep.reward(0.5, completion_id=completion, name="turn")
    ep.reward(9.0)
    ep.reward(1.0)  # the last reward with a name replaces the others


@episode
async def unrewarded(task: dict, ep: Episode) -> None:
    await ask(ep)


@episode
async def says_it_failed(task: dict, ep: Episode) -> float:
    await ask(ep)
    ep.fail("the tool server is down")
    return 0.0


@episode
async def calls_until_refused(task: dict, ep: Episode) -> float:
    while True:
        await ask(ep)


@episode
async def fails_at_first(task: dict, ep: Episode) -> float:
    """Fail at the first attempt at each task, which a file per task records."""
    await ask(ep)
    mark = Path(task["folder"]) / f"{task['id']}"
    if not mark.exists():
        mark.touch()
        raise RuntimeError("first attempt")
    return 1.0


@episode
async def one_of_a_task_hangs(task: dict, ep: Episode) -> float:
    """Hang at the first attempt at each task, which a file per task records."""
    mark = Path(task["folder"]) / task["id"].replace("/", "-")
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        await ask(ep)
        return 1.0
    await ask(ep)
    await asyncio.sleep(3600)
    return 0.0


@episode
async def fails_on_bad_tasks(task: dict, ep: Episode) -> float:
    await ask(ep)
    if task.get("bad"):
        raise RuntimeError("this task never works")
    return float(task["n"])


@episode
def sync_good(task: dict, ep: Episode) -> float:
    print("what an agent prints disturbs nobody")
    client = OpenAI(base_url=f"{ep.base_url.split('/e/')[0]}/v1", api_key=current_key)
    client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], **SHORT)
    ep.reward(0.5 if os.getppid() == task.get("runner", os.getppid()) else -0.5, name="process")
    return 1.0


@episode
def sync_raises(task: dict, ep: Episode) -> float:
    sys.exit("enough")


@episode
def sync_parses(task: dict, ep: Episode) -> float:
    client = OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], **SHORT)
    return float("not a number")


@episode
def sync_hangs(task: dict, ep: Episode) -> float:
    client = OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], **SHORT)
    ep.reward(0.25, name="so far")
    Path(task["pid_file"]).write_text(f"{os.getpid()}\n")
    while True:
        time.sleep(1)  # until the process is killed


@episode
def sync_dies(task: dict, ep: Episode) -> float:
    os._exit(7)


def one_argument(task: dict) -> None: ...


NOT_A_FUNCTION = 3
