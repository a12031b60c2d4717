"""Agents whose clients are created when the module is imported, before any episode.

OPENAI_BASE_URL must be set before the import, as in a rollout process.
"""

from __future__ import annotations

from mode_agents import Talk, play
from openai import AsyncOpenAI, OpenAI

from areal_agents import Episode, current_key, episode

CLIENT = AsyncOpenAI(api_key=current_key)
BLOCKING_CLIENT = OpenAI(api_key=current_key)


@episode
async def as_coroutine(task: dict, ep: Episode) -> float:
    talk = Talk(task)
    while talk.take(await CLIENT.chat.completions.create(**talk.call)):
        pass
    return talk.rewarded(ep)


@episode
def in_a_worker(task: dict, ep: Episode) -> float:
    return play(BLOCKING_CLIENT, task, ep)
