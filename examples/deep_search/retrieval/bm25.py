"""Sparse retrieval: BM25 by bm25s over the words of titles and texts.

Words are runs of letters and digits without case and accents; English stop words are left out. A query that
shares no word with a passage does not find it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from areal_agents.extras import require

TITLE_WEIGHT = 3  # a passage about Niger should beat those that only mention it
_COMPILED_FROM = 20_000  # passages; compiling takes seconds, which a smaller corpus does not win back
_LEAST_QUERIES = 16  # of a thread: handing fewer over takes longer than searching them
_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Return the words of a text, in order."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    left_out = _stop_words()
    return [word for word in _WORD.findall(text.lower()) if word not in left_out]


def _bm25s() -> Any:
    """Return the module bm25s, imported on first use: a client of a retrieval server does not need it."""
    require("bm25s", "an index of passages")
    # Where JAX is installed, bm25s computes with it when it is imported; this keeps it off the GPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import bm25s.stopwords

    return bm25s


@cache
def _stop_words() -> frozenset[str]:
    return frozenset(_bm25s().stopwords.STOPWORDS_EN)


class Bm25:
    """A BM25 index; rows are the numbers of passages in the order of the corpus."""

    def __init__(self, index: Any) -> None:
        self._passages = int(index.scores["num_docs"])
        self._index = index
        self._word_ids: dict[str, int] = index.vocab_dict
        self._threads = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="bm25")

    @classmethod
    def build(cls, documents: Iterable[tuple[str, str]]) -> Bm25:
        """Index (title, text) of each passage."""
        ids: dict[str, int] = {}
        rows = []
        for title, text in documents:
            found = words(title) * TITLE_WEIGHT + words(text)
            rows.append([ids.setdefault(word, len(ids)) for word in found])
        index = _bm25s().BM25(method="lucene", backend=_backend(len(rows)))
        index.index((rows, ids or {"": 0}), show_progress=False)
        return cls(index)

    def save(self, folder: Path) -> None:
        """Write the index to a folder."""
        self._index.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path, passages: int) -> Bm25:
        """Read what `save` wrote."""
        return cls(_bm25s().BM25.load(folder, show_progress=False, backend=_backend(passages)))

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Return the best k (row, score) of each query, the best first; equal scores by row."""
        each = max(_LEAST_QUERIES, -(-len(queries) // self._threads))
        parts = [queries[begin : begin + each] for begin in range(0, len(queries), each)]
        if len(parts) == 1:
            return self._search(parts[0], k)
        return [found for part in self._pool.map(lambda part: self._search(part, k), parts) for found in part]

    def _search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        known = [[*{self._word_ids[w]: None for w in words(q) if w in self._word_ids}] for q in queries]
        places = [place for place, ids in enumerate(known) if ids]
        found: list[list[tuple[int, float]]] = [[] for _ in queries]
        if not places:
            return found
        rows, scores = self._index.retrieve(
            [known[place] for place in places], k=min(k, self._passages), show_progress=False
        )
        for place, of_query, their_scores in zip(places, rows.tolist(), scores.tolist(), strict=True):
            pairs = [(row, score) for row, score in zip(of_query, their_scores, strict=True) if score > 0]
            found[place] = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        return found

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _backend(passages: int) -> str:
    """Return how bm25s computes: compiled by numba if it is installed and the corpus is large."""
    compiled = passages >= _COMPILED_FROM and importlib.util.find_spec("numba") is not None
    return "numba" if compiled else "numpy"
