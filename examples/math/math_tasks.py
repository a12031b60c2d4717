"""Tasks of mathematics from the Hugging Face Hub, in one form: {"id", "question", "answer"}.

The answer is what is compared; solutions and other columns are left out, so no agent sees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def gsm8k(split: str) -> list[dict[str, str]]:
    """Word problems of primary school (arXiv 2110.14168): 7,473 in `train`, 1,319 in `test`."""
    return tasks_of(_rows("openai/gsm8k", split, subset="main"))


def deepscaler() -> list[dict[str, str]]:
    """40,315 problems of competitions, without those of AIME 2024 and later."""
    return tasks_of(_rows("agentica-org/DeepScaleR-Preview-Dataset", "train"))


def math_500() -> list[dict[str, str]]:
    """500 problems of MATH (arXiv 2103.03874), chosen by Lightman et al. (arXiv 2305.20050)."""
    return tasks_of(_rows("HuggingFaceH4/MATH-500", "test"))


def aime_2024() -> list[dict[str, str]]:
    """The 30 problems of AIME 2024."""
    return tasks_of(_rows("HuggingFaceH4/aime_2024", "train"))


def amc_2023() -> list[dict[str, str]]:
    """40 problems of the AMC 12 of 2023."""
    return tasks_of(_rows("math-ai/amc23", "test"))


def tasks_of(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows as tasks. Raises ValueError if a row has no question or no answer."""
    return [
        {"id": str(number), "question": _first(row, ("question", "problem")), "answer": _answer(row)}
        for number, row in enumerate(rows)
    ]


def _answer(row: Mapping[str, Any]) -> str:
    answer = _first(row, ("answer",))
    # GSM8K has the solution in this column, and the answer behind four number signs.
    return answer.rpartition("####")[2].replace(",", "").strip() if "####" in answer else answer


def _first(row: Mapping[str, Any], columns: tuple[str, ...]) -> str:
    for column in columns:
        if row.get(column) not in (None, ""):
            return str(row[column])
    raise ValueError(f"a row must have one of the columns {', '.join(columns)}; it has {', '.join(row)}")


def _rows(name: str, split: str, *, subset: str | None = None) -> Iterable[Mapping[str, Any]]:
    import datasets

    return datasets.load_dataset(name, subset, split=split)
