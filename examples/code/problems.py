"""Problems as tasks: those of problems.jsonl, of LiveCodeBench and of the DeepCoder data set.

A task has the statement (`question`), `public_tests`, which the agent shows to the policy, and `tests`, which
decide the reward; both in the form of LiveCodeBench. `func_name` and `starter_code` are "" where the program
reads standard input.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LIVECODEBENCH = "lighteval/code_generation_lite"  # the data set of LiveCodeBench, as parquet files
DEEPCODER = "agentica-org/DeepCoder-Preview-Dataset"
SUBSETS = {"train": ("primeintellect", "taco", "lcbv5"), "test": ("codeforces",)}  # of DEEPCODER
PUBLIC = 2  # of a data set that does not tell public tests apart, so many are shown
FEWEST, MOST = 5, 20  # tests of a problem of DeepCoder; problems with fewer are easily passed by chance
LARGEST_TEST = 65_536  # characters of an input and its output; tests beyond are left out of training

Task = dict[str, Any]


def own() -> list[Task]:
    """The twenty problems of problems.jsonl, which was written for this example."""
    lines = (Path(__file__).parent / "problems.jsonl").read_text(encoding="utf-8").splitlines()
    return [of_livecodebench(json.loads(line)) for line in lines]


def livecodebench(version: str = "v6") -> list[Task]:
    """The problems that a version of LiveCodeBench added (v1 to v6); for evaluation only."""
    import datasets

    return [of_livecodebench(row) for row in datasets.load_dataset(LIVECODEBENCH, version, split="test")]


def deepcoder(split: str = "train") -> list[Task]:
    """The problems of DeepCoder that read standard input, and those of its LiveCodeBench subset."""
    import datasets

    found: list[Task] = []
    for subset in SUBSETS[split]:
        for number, row in enumerate(datasets.load_dataset(DEEPCODER, subset, split=split)):
            task = of_deepcoder(row, f"{subset}-{number}")
            found += [task] if task is not None else []
    return found


def of_livecodebench(row: Mapping[str, Any]) -> Task:
    """A row of LiveCodeBench. Its hidden tests are all of its tests, as in its own evaluation."""
    public, private = read_cases(row["public_test_cases"]), read_cases(row["private_test_cases"])
    metadata = json.loads(row.get("metadata") or "{}")
    task = {
        "id": row["question_id"],
        "question": row["question_content"].strip(),
        "starter_code": row.get("starter_code") or "",
        "func_name": metadata.get("func_name") or "",
        "public_tests": public,
        "tests": [*public, *private],
        "difficulty": row.get("difficulty") or "",
    }
    # Only our own problems have one; `areal-agents doctor --rewards` plays it.
    return {**task, "solution": row["solution"]} if "solution" in row else task


def of_deepcoder(row: Mapping[str, Any], task_id: str) -> Task | None:
    """A row of any subset of DeepCoder; None if it is not used.

    Not used are problems with fewer than FEWEST tests of a bearable size, and functional ones outside of the
    LiveCodeBench subset: their expected results are wrapped in a list in some rows and not in others.
    """
    tests = list(_tests_of_deepcoder(row["tests"]))
    kinds = {test["testtype"] for test in tests}
    name = next((test.pop("func_name") for test in tests if "func_name" in test), "")
    kept = [test for test in tests if len(test["input"]) + len(test["output"]) <= LARGEST_TEST][:MOST]
    if len(kinds) != 1 or (kinds == {"functional"} and not name) or len(kept) < FEWEST:
        return None
    return {
        "id": task_id,
        "question": row["problem"].strip(),
        "starter_code": row.get("starter_code") or "",
        "func_name": name,
        "public_tests": kept[:PUBLIC],
        "tests": kept,
    }


def _tests_of_deepcoder(text: str) -> Iterator[dict[str, str]]:
    """Yield tests in the form of LiveCodeBench; the subsets have three forms of their own."""
    given = json.loads(text)
    if isinstance(given, Mapping):  # taco
        kind = "functional" if given.get("fn_name") else "stdin"
        for test_input, output in zip(given["inputs"], given["outputs"], strict=True):
            yield {"input": _text(test_input), "output": _text(output), "testtype": kind}
        return
    for test in given:
        kind = test.get("testtype") or ("functional" if test.get("type") == "function_call" else "stdin")
        read = {"input": _text(test["input"]), "output": _text(test["output"]), "testtype": kind}
        if name := (test.get("metadata") or {}).get("func_name"):  # lcbv5
            read["func_name"] = name
        yield read


def _text(value: Any) -> str:
    """A text, or the lines of one."""
    return value if isinstance(value, str) else "\n".join(map(str, value))


def read_cases(text: str) -> list[dict[str, str]]:
    """Read tests of LiveCodeBench: JSON, or JSON that is pickled, compressed and in base 64."""
    if not text.lstrip().startswith("["):
        text = _PlainUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load()
    return [{name: test[name] for name in ("input", "output", "testtype")} for test in json.loads(text)]


class _PlainUnpickler(pickle.Unpickler):
    """Reads a pickled string; a pickle that names anything to import is refused, so none can run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a data set must not import {module}.{name}")
