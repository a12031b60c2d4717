"""What the laptop configuration has instead of a large model and a large corpus.

The tiny model descends from that of the quick start and knows one prompt and one tool, so it is shown these
and nothing else. The corpus is `data/corpus.jsonl`, indexed in the agent's own process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from research import Limits, Style
from retrieval import Columns, Index, build_index, read_corpus
from search_backends import LocalIndex, Page, PageNotFound, Result

CORPUS = Path(__file__).parent / "data" / "corpus.jsonl"
LIMITS = Limits(turns=5, reply_tokens=48, context_tokens=1536, results=2)
QUICK_START = Style(
    system_prompt="You are a search agent. Search for facts, then reply with the short answer only.",
    tools=(
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Search the encyclopedia.",
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string"}},
                    "required": ["query"],
                },
            },
        },
    ),
    last_turn="",
)


@cache
def encyclopedia() -> LocalIndex:
    """Return the backend that searches the corpus; building its index takes half a second."""
    with tempfile.TemporaryDirectory(prefix="deep-search-") as folder:
        build_index(read_corpus(CORPUS, Columns()), Path(folder) / "index")
        return LocalIndex(Index(Path(folder) / "index"))  # it holds what it needs open


class Nothing:
    """A backend without pages."""

    async def search(self, query: str, k: int) -> Sequence[Result]:
        """See `Backend.search`."""
        return ()

    async def access(self, url: str) -> Page:
        """See `Backend.access`."""
        raise PageNotFound(f"there is no page {url}")
