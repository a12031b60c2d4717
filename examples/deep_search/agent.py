"""The agents that the configurations name: one loop (`research.py`) with the limits of three sizes of machine.

`python agent.py "question"` asks the model behind OPENAI_BASE_URL, and shows the conversation.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from research import SEARCH_TOOL, Limits, Style, research
from retrieval import Columns, Index, build_index, read_corpus
from search_backends import Backend, LocalIndex, backend_of

from areal_agents import Episode, episode

DATA = Path(__file__).parent / "data"
HTTP = DefaultAsyncHttpxClient(timeout=900)  # one for all episodes; a reply waits for a busy engine

ONE_GPU = Limits(turns=16, reply_tokens=768, context_tokens=8192)
LONG = Limits(
    turns=128, reply_tokens=1024, context_tokens=32_000, results=5, page_characters=40_000, summary_above=4000
)

# The tiny model of the quick start knows its own prompt and its one tool, and has no room for more.
QUICK_START = Style(
    system_prompt="You are a search agent. Search for facts, then reply with the short answer only.",
    tools=(
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Search the encyclopedia.",
                "parameters": SEARCH_TOOL["function"]["parameters"]
                | {"properties": {"query": {"type": "string"}}},
            },
        },
    ),
    last_turn="",
)
LAPTOP = Limits(turns=5, reply_tokens=48, context_tokens=1536, results=2)


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
    """The same for the model of the quick start, over `data/corpus.jsonl`, without a network."""
    await research(_client(ep), task["question"], encyclopedia(), limits=LAPTOP, style=QUICK_START)


@episode
async def blind_search(task: dict[str, Any], ep: Episode) -> None:
    """The laptop's agent whose searches find nothing: what does the model know without looking?"""
    await research(_client(ep), task["question"], _Nothing(), limits=LAPTOP, style=QUICK_START)


class _Nothing(LocalIndex):
    """A backend without pages."""

    def __init__(self) -> None:
        pass

    async def search(self, query: str, k: int) -> tuple[()]:
        """Find nothing."""
        return ()


def _client(ep: Episode) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)


@cache
def _backend() -> Backend:
    return backend_of()


@cache
def encyclopedia() -> Backend:
    """Return an index of the small corpus, which takes half a second to build."""
    with tempfile.TemporaryDirectory(prefix="deep-search-") as folder:
        build_index(read_corpus(DATA / "corpus.jsonl", Columns()), Path(folder) / "index")
        return LocalIndex(Index(Path(folder) / "index"))


if __name__ == "__main__":
    conversation: list[dict[str, Any]] = []
    question = " ".join(sys.argv[1:])
    asyncio.run(
        research(AsyncOpenAI(), question, _backend(), limits=ONE_GPU, style=Style(), messages=conversation)
    )
    print(*(json.dumps(message, ensure_ascii=False) for message in conversation), sep="\n")
