"""The agent of the tests of evaluations, with functions that score its episodes.

It records each episode that it plays. While a file `hold` exists, episodes after the first HELD_AFTER wait.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from areal_agents import Episode
from areal_agents.rewards import FinishedEpisode

HERE = Path(__file__).parent
HELD_AFTER = 4


async def agent(task: dict[str, Any], ep: Episode) -> float:
    """Send one request, and score 1 if the reply has an even number of characters."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    question: Any = [{"role": "user", "content": task["question"]}]
    reply = await client.chat.completions.create(model="policy", messages=question, max_tokens=6)
    played = HERE / "played.txt"
    while (HERE / "hold").exists() and len(played.read_text().splitlines()) >= HELD_AFTER:
        await asyncio.sleep(0.02)
    with open(played, "a") as file:
        file.write(f"{task['id']}\n")
    return float(len(reply.choices[0].message.content or "") % 2 == 0)


def answer(episode: FinishedEpisode) -> str | None:
    """The number of characters of the reply, if it has any."""
    return str(len(episode.answer)) if episode.answer else None


def length(episode: FinishedEpisode) -> float:
    """A reward that differs from the agent's."""
    return float(len(episode.answer))


def fails_on_t1(episode: FinishedEpisode) -> dict[str, float]:
    """Fail or end the process, depending on the task."""
    if episode.task["id"] == "t1":
        raise LookupError("no such rubric: \ud800")  # cannot be encoded in UTF-8
    if episode.task["id"] == "t2":
        os._exit(3)
    return {"told": episode.rewards.get("return", -1.0), "extra": 0.5}


def hangs(episode: FinishedEpisode) -> float:
    """Take longer than any time limit."""
    time.sleep(600)
    return 1.0


def fails_after_one_of_t0(episode: FinishedEpisode) -> float:
    """Return 5 for the first episode of t0, and fail for its other ones; return 1 for other tasks."""
    if episode.task["id"] == "t0":
        with open(HERE / "rescored-t0", "x"):
            pass
    return 5.0 if episode.task["id"] == "t0" else 1.0


def enormous_on_t0(episode: FinishedEpisode) -> float:
    """A number that is too large for a reward, on one task."""
    return 1e308 if episode.task["id"] == "t0" else 1.0


def ranks(episodes: list[FinishedEpisode]) -> list[float]:
    """The number of episodes in the group, for each of them."""
    return [float(len(episodes))] * len(episodes)
