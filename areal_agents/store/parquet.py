"""Exports turns as Parquet files: one row per turn, with the outcome of its episode."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn
from areal_agents.errors import ConfigError, StoreError
from areal_agents.store.store import Store
from areal_agents.whole_files import replacing


def write_export(store: Store, groups: Sequence[str], folder: Path) -> Path:
    """Write the episodes of groups to a new file in `folder` and return its path.

    The file appears under its name only when it is complete and synced to the disk.

    Raises:
        StoreError: the file cannot be written.
        ConfigError: pyarrow is not installed.
    """
    parquet, pyarrow = _pyarrow()
    rows = [row for group in groups for row in _rows(store, group)]
    columns = {name: [row[name] for row in rows] for name in _schema(pyarrow).names}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"turns-{_next_number(folder):08d}.parquet"
        with replacing(path) as temporary, open(temporary, "wb") as file:
            parquet.write_table(pyarrow.table(columns, schema=_schema(pyarrow)), file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"cannot export turns to {folder}: {error}") from error
    return path


def newest_export(folder: Path) -> Path | None:
    """Return the file that was written last, or None if there is none."""
    files = sorted(folder.glob("turns-*.parquet"))
    return files[-1] if files else None


def exported_groups(path: Path) -> list[str]:
    """Return the groups whose turns a file contains. Raises StoreError if it is not an export."""
    parquet, pyarrow = _pyarrow()
    try:
        column = parquet.read_table(path, columns=["group_id"])["group_id"]
    except (OSError, pyarrow.ArrowException) as error:
        raise StoreError(
            f"cannot read {path} as an export of turns: {error}; move the file elsewhere"
        ) from error
    return list(dict.fromkeys(column.to_pylist()))


def _next_number(folder: Path) -> int:
    newest = newest_export(folder)
    return int(newest.stem.removeprefix("turns-")) + 1 if newest is not None else 1


def _rows(store: Store, group_id: str) -> Iterator[dict[str, Any]]:
    for summary in store.episodes(group_id=group_id):
        episode = store.load_episode(summary.id)
        outcome = {
            "group_id": group_id,
            "task_id": summary.task_id,
            "index": summary.index,
            "split": summary.split,
            "status": summary.status,
            "score": summary.score,
            "rewards": json.dumps([[r.scope, r.target, r.name, r.value] for r in episode.rewards]),
        }
        for turn in episode.turns:
            yield {**outcome, **_turn(episode, turn)}


def _turn(episode: RecordedEpisode, turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    return {
        "episode_id": episode.id,
        "turn_id": turn.id,
        "parent": turn.parent,
        "messages": json.dumps([message.to_dict() for message in turn.new_messages]),
        "reply": json.dumps(turn.reply.to_dict()),
        "finish_reason": completion.finish_reason,
        "constrained": turn.constrained,
        "discarded": turn.discarded or None,
        "recorded_before": turn.recorded_before,
        "temperature": turn.sampling.temperature,
        "prompt_ids": np.asarray(turn.new_prompt_ids),
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "versions": completion.versions,
        "exported_at": time.time(),
    }


def _schema(pyarrow: Any) -> Any:
    string, integers = pyarrow.string(), pyarrow.list_(pyarrow.int32())
    return pyarrow.schema(
        {
            **dict.fromkeys(("group_id", "task_id", "episode_id"), string),
            "index": pyarrow.int32(),
            **dict.fromkeys(("split", "status"), string),
            "score": pyarrow.float64(),
            **dict.fromkeys(("rewards", "turn_id", "parent", "messages", "reply", "finish_reason"), string),
            "constrained": pyarrow.bool_(),
            "discarded": string,
            "recorded_before": pyarrow.int32(),
            "temperature": pyarrow.float64(),
            **dict.fromkeys(("prompt_ids", "token_ids"), integers),
            "logprobs": pyarrow.list_(pyarrow.float32()),
            "versions": integers,
            "exported_at": pyarrow.float64(),
        }
    )


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "store.retain.export writes Parquet files and needs pyarrow, which is not installed; run "
            "pip install pyarrow"
        ) from None
    return pyarrow.parquet, pyarrow
