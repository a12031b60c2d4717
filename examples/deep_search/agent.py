"""The agents that configurations name: one loop (`research.py`) with the limits of three sizes of machine.

`python agent.py "question"` asks the model behind OPENAI_BASE_URL, and shows the conversation.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache
from typing import Any

import laptop
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from research import Limits, Style, research
from search_backends import Backend, backend_of

from areal_agents import Episode, episode

HTTP = DefaultAsyncHttpxClient(timeout=900)  # one for all episodes; a reply waits for a busy engine

ONE_GPU = Limits(turns=16, reply_tokens=768, context_tokens=8192)
LONG = Limits(
    turns=128, reply_tokens=1024, context_tokens=32_000, results=5, page_characters=40_000, summary_above=4000
)


@episode
async def deep_search(task: dict[str, Any], ep: Episode) -> None:
    """Answer the question within the limits of a model on one GPU; `reward:` names the reward."""
    await research(_client(ep), task["question"], _backend(), limits=ONE_GPU, style=Style())


@episode
async def long_search(task: dict[str, Any], ep: Episode) -> None:
    """The same with up to 128 turns, and long pages that the model condenses before it reads them."""
    await research(_client(ep), task["question"], _backend(), limits=LONG, style=Style())


@episode
async def laptop_search(task: dict[str, Any], ep: Episode) -> None:
    """The same for the tiny model in `model/`, over `data/corpus.jsonl`, without a network."""
    await research(
        _client(ep), task["question"], laptop.encyclopedia(), limits=laptop.LIMITS, style=laptop.QUICK_START
    )


@episode
async def blind_search(task: dict[str, Any], ep: Episode) -> None:
    """The laptop's agent whose searches find nothing: what does the model know without looking?"""
    await research(
        _client(ep), task["question"], laptop.Nothing(), limits=laptop.LIMITS, style=laptop.QUICK_START
    )


def _client(ep: Episode) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)


@cache
def _backend() -> Backend:
    return backend_of()


if __name__ == "__main__":
    conversation: list[dict[str, Any]] = []
    question = " ".join(sys.argv[1:])
    asyncio.run(
        research(AsyncOpenAI(), question, _backend(), limits=ONE_GPU, style=Style(), messages=conversation)
    )
    print(*(json.dumps(message, ensure_ascii=False) for message in conversation), sep="\n")
