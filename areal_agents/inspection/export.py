"""Writes episodes to a file for other programs: JSON lines, or Parquet with one row for each episode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from areal_agents.core.conversations import conversations
from areal_agents.errors import ConfigError
from areal_agents.whole_files import replacing

# In Parquet, what has no fixed form is a JSON string.
COLUMNS = (
    "id", "task_id", "task", "group", "index", "split", "status", "error", "score", "rewards", "messages",
    "branches", "turns", "sampled_tokens", "version_min", "version_max", "metadata", "created_at", "ended_at",
)  # fmt: skip
_AS_JSON = ("task", "rewards", "messages", "branches", "metadata")


def row_of(summary: Mapping[str, Any], episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode as a row.

    `branches` has every conversation, each a list of messages in the form of chat completions, in the order
    of their last replies; `messages` is the last of them.
    """
    branches = conversations(episode["turns"])
    return {
        **{name: summary[name] for name in COLUMNS if name in summary},
        "task": episode["task"]["input"],
        "group": summary["group_id"],
        "rewards": [dict(reward) for reward in episode["rewards"]],
        "messages": branches[-1] if branches else [],
        "branches": branches,
    }


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows as JSON lines; the file appears when it is whole. Returns the number of rows."""
    count = 0
    with _replacing(path) as temporary, open(temporary, "w") as file:
        for row in rows:
            file.write(json.dumps({name: row[name] for name in COLUMNS}, ensure_ascii=False) + "\n")
            count += 1
    return count


def write_parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows as Parquet; the file appears when it is whole. Returns the number of rows.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ConfigError(
            "Parquet needs pyarrow: pip install 'areal-agents[train]'; or use --jsonl"
        ) from None
    number, whole, text = pyarrow.float64(), pyarrow.int64(), pyarrow.string()
    types = {
        "index": whole, "turns": whole, "sampled_tokens": whole, "version_min": whole, "version_max": whole,
        "score": number, "created_at": number, "ended_at": number,
    }  # fmt: skip
    schema = pyarrow.schema([(name, types.get(name, text)) for name in COLUMNS])
    data = [
        {
            name: json.dumps(row[name], ensure_ascii=False) if name in _AS_JSON else row[name]
            for name in COLUMNS
        }
        for row in rows
    ]
    with _replacing(path) as temporary:
        parquet.write_table(pyarrow.Table.from_pylist(data, schema=schema), temporary)
    return len(data)


def _replacing(path: Path) -> AbstractContextManager[Path]:
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}")
    return replacing(path)
