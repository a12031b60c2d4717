"""Reward functions of the tests, in a separate file because they are loaded by path."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence

from areal_agents.rewards import FinishedEpisode


def by_length(episode: FinishedEpisode) -> float:
    return float(len(episode.messages))


async def by_name(episode: FinishedEpisode) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"turns": 1.0, "polite": 0.5}


def told(episode: FinishedEpisode) -> dict[str, float]:
    """Return ten times each reward that the agent gave itself."""
    return {f"told {name}": 10 * value for name, value in episode.rewards.items()}


def style(episode: FinishedEpisode) -> dict[str, float]:
    return {"style": 0.25}


def fails(episode: FinishedEpisode) -> float:
    raise KeyError("no such rubric")


def gives_nothing(episode: FinishedEpisode) -> None:
    return None


async def hangs(episode: FinishedEpisode) -> float:
    await asyncio.sleep(3600)
    return 1.0


def sleeps(episode: FinishedEpisode) -> float:
    time.sleep(1.0)
    return 1.0


def waits_forever(episode: FinishedEpisode) -> float:
    threading.Event().wait()
    return 1.0


def exits(episode: FinishedEpisode) -> float:
    sys.exit("no such file")


async def exits_in_the_loop(episode: FinishedEpisode) -> float:
    sys.exit("no such file")


def interrupts(episode: FinishedEpisode) -> float:
    raise KeyboardInterrupt


def gives_too_much(episode: FinishedEpisode) -> int:
    return 10**400


def by_rank(episodes: Sequence[FinishedEpisode]) -> list[float]:
    return [index / len(episodes) for index in range(len(episodes))]


def too_few(episodes: Sequence[FinishedEpisode]) -> list[float]:
    return []
