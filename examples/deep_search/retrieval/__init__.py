"""Local retrieval over a corpus of passages: an index on disk, and a server that searches it and opens pages.

`python -m retrieval build corpus.jsonl INDEX` builds an index, `python -m retrieval serve INDEX` serves it.
"""

from __future__ import annotations

from retrieval.index import MODES, Hit, Index, Mode, build_index
from retrieval.passages import Columns, Passage, read_corpus
from retrieval.server import build_app

__all__ = ["MODES", "Columns", "Hit", "Index", "Mode", "Passage", "build_app", "build_index", "read_corpus"]
