"""The agent's only tool: BM25 over the encyclopedia, the two best passages.

The same query always gives the same text; a query without a known word gives `NO_RESULTS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache

import numpy as np
from corpus import Entity, encyclopedia

from areal_agents.extras import require

require("bm25s", "the search of the encyclopedia")
# Where JAX is installed, bm25s computes with it when it is imported; this keeps it off the GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import bm25s  # noqa: E402

NO_RESULTS = "No results."
TITLE_WEIGHT = 3  # a passage about Niger should beat those that only mention it


class SearchIndex:
    """A BM25 index over the passages of `entities`."""

    def __init__(self, entities: Sequence[Entity]) -> None:
        self._passages = [entity.passage for entity in entities]
        self._bm25 = bm25s.BM25(method="lucene")
        words = [_words(entity.name) * TITLE_WEIGHT + _words(entity.passage) for entity in entities]
        self._bm25.index(words, show_progress=False)
        self._vocabulary = {word for passage in words for word in passage}

    def search(self, query: str, *, top: int = 2) -> str:
        """The `top` best passages, numbered, one a line; ties go to the earlier entity."""
        known = [word for word in dict.fromkeys(_words(query)) if word in self._vocabulary]
        if not known:
            return NO_RESULTS
        scores = self._bm25.get_scores(known)
        hits = np.flatnonzero(scores > 0)
        best = hits[np.argsort(-scores[hits], kind="stable")[:top]]
        return "\n".join(f"[{rank}] {self._passages[hit]}" for rank, hit in enumerate(best, start=1))


@cache
def encyclopedia_index() -> SearchIndex:
    """The index over the whole encyclopedia, built once a process (about a second)."""
    return SearchIndex(encyclopedia())


def search(query: str) -> str:
    """Search the encyclopedia."""
    return encyclopedia_index().search(query)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
