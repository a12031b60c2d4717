"""The retrieval benchmark in miniature: a server answers queries over a small corpus."""

from __future__ import annotations

from pathlib import Path

from benchmarks.retrieval import measure_retrieval


def test_a_small_corpus_is_measured(tmp_path: Path) -> None:
    figures = measure_retrieval(tmp_path, passages=200, queries=128)
    bm25 = figures.modes["bm25"]
    assert figures.passages == 200 and set(figures.modes) == {"bm25"}
    assert bm25.one_per_s > 0 and bm25.many_per_s > 0 and 0 < bm25.one_p50_ms <= bm25.one_p99_ms
