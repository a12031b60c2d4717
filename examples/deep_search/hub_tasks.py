"""Tasks of published multi-hop data sets: {"id", "question", "answer", "answer_aliases", "hops"}.

Each function is a data source of a configuration. `datasets` downloads the data once; `source` may also name
a local folder with the same columns. The paragraphs that the data sets carry are left out: the agent has to
find them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ASEARCHER = "hf://datasets/inclusionAI/ASearcher-train-data/ASearcher-Base-35k.jsonl"


def musique(split: str = "train", *, source: str = "dgslibisey/MuSiQue") -> list[dict[str, Any]]:
    """Return MuSiQue (arXiv 2108.00573): "train" or "validation"; `hops` is 2, 3 or 4."""
    return [
        {
            "id": row["id"],
            "question": row["question"],
            "answer": row["answer"],
            "answer_aliases": row["answer_aliases"],
            "hops": len(row["question_decomposition"]),
        }
        for row in _rows(source, split)
    ]


def hotpot(
    split: str = "train", *, source: str = "hotpotqa/hotpot_qa", subset: str | None = "fullwiki"
) -> list[dict[str, Any]]:
    """Return HotpotQA (arXiv 1809.09600): "train" or "validation"; every question has 2 hops."""
    return [
        {
            "id": row["id"],
            "question": row["question"],
            "answer": row["answer"],
            "hops": 2,
            "kind": row["type"],
        }
        for row in _rows(source, split, name=subset)
    ]


def asearcher(*, source: str = ASEARCHER) -> list[dict[str, Any]]:
    """Return the training questions of ASearcher (arXiv 2508.07976); their hops are not known."""
    return [
        {
            "id": f"asearcher-{number}",
            "question": row["question"],
            "answer": row["answer"],
            "answer_aliases": row.get("aug_answer") or [],
            "kind": row.get("source"),
        }
        for number, row in enumerate(_rows("json", "train", data_files=source))
        if row["answer"]
    ]


def _rows(path: str, split: str, **which: Any) -> Iterator[Mapping[str, Any]]:
    import datasets  # imported late: it takes seconds

    return iter(datasets.load_dataset(path, split=split, **which))
