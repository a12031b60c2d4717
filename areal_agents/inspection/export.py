"""Writes episodes to a file, or a folder, in the form that another program reads."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_agents.core.conversations import conversations
from areal_agents.errors import ConfigError
from areal_agents.extras import require
from areal_agents.inspection.formats.atif import documents
from areal_agents.inspection.formats.conversations import messages_rows, preference_rows, sft_rows
from areal_agents.inspection.formats.training_trace import trace
from areal_agents.whole_files import replacing

# In Parquet, what has no fixed form is a JSON string.
COLUMNS = (
    "id", "task_id", "task", "group", "index", "split", "status", "error", "score", "rewards", "messages",
    "branches", "turns", "sampled_tokens", "version_min", "version_max", "metadata", "created_at", "ended_at",
)  # fmt: skip
_AS_JSON = ("task", "rewards", "messages", "branches", "metadata")


Format = Literal["jsonl", "parquet", "messages", "sft", "pairs", "atif", "openenv"]
_UNNAMED = ("messages", "sft", "pairs")  # rows to train on, which do not say of which split they are


@dataclass(frozen=True, slots=True)
class Written:
    """What an export has written.

    Attributes:
        what: how many rows of which kind, in words.
        held_out: of a format that trainers read, how many of these are of episodes of split eval.
    """

    what: str
    held_out: int = 0


def split_of(form: Format, asked: Literal["train", "eval", "all"] | None) -> Literal["train", "eval"] | None:
    """Return the split of which an export writes episodes, None for both; training never sees the held-out
    tasks of a data set by default."""
    if asked is None:
        return "train" if form in _UNNAMED else None
    return None if asked == "all" else asked


def export(
    summaries: Iterable[Mapping[str, Any]],
    load: Callable[[str], Mapping[str, Any]],
    out: Path,
    form: Format,
) -> Written:
    """Write episodes in a format, whole or not at all.

    Args:
        summaries: the episodes, as GET /episodes lists them.
        load: returns an episode with its tokens, as GET /episodes/{id}?tokens=1 does.
        out: a file; for sft, pairs and atif a folder, which must not exist.

    Raises:
        ConfigError: `out` cannot be written, or nothing is to be written to it.
    """
    if form in ("jsonl", "parquet"):
        write = write_jsonl if form == "jsonl" else write_parquet
        return Written(f"{write((row_of(found, load(found['id'])) for found in summaries), out)} episodes")
    episodes = (load(found["id"]) for found in summaries)
    if form == "sft":
        return Written(
            f"{_write_data_set([row for e in episodes for row in sft_rows(e)], out)} conversations"
        )
    if form == "pairs":
        return Written(f"{_write_data_set(list(preference_rows(episodes)), out)} pairs")
    held_out = 0

    def rows(made: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]]) -> Iterator[Mapping[str, Any]]:
        nonlocal held_out
        for episode in episodes:
            for row in made(episode):
                held_out += episode["split"] == "eval"
                yield row

    if form == "messages":
        what = f"{_write_lines(rows(messages_rows), out)} conversations"
    elif form == "openenv":
        what = f"{_write_lines(rows(lambda episode: [trace(episode)]), out)} traces"
    else:
        what = f"{_write_documents(rows(documents), out)} trajectories"
    return Written(what, held_out)


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
            "Parquet needs pyarrow: pip install 'areal-agents[train]'; or use --format jsonl"
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


def _write_lines(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows as JSON lines, as they are; return how many."""
    count = 0
    with _replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def _write_documents(found: Iterable[Mapping[str, Any]], folder: Path) -> int:
    """Write a file for each ATIF document; return how many."""
    count = 0
    with _new_folder(folder) as temporary:
        for document in found:
            text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1)
            (temporary / f"{document['trajectory_id']}.json").write_text(text + "\n", encoding="utf-8")
            count += 1
    return count


def _write_data_set(rows: Sequence[Mapping[str, Any]], folder: Path) -> int:
    """Write a data set of `datasets`, which `datasets.load_from_disk` reads; return the number of rows."""
    if not rows:
        raise ConfigError(
            "there is nothing to write: no episode fits, or no scores of one task differ; without --split, "
            "only episodes of split train are written in this format"
        )
    require("datasets", "a data set")
    import datasets

    datasets.disable_progress_bars()
    with _new_folder(folder) as temporary:
        datasets.Dataset.from_list(list(rows)).save_to_disk(str(temporary))
    return len(rows)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that becomes `folder` at the end of the block, and is removed if the block raises."""
    if folder.exists():
        raise ConfigError(f"{folder} exists; give a folder that does not")
    if not folder.parent.is_dir():
        raise ConfigError(f"there is no folder {folder.parent}")
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replacing(path: Path) -> AbstractContextManager[Path]:
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}")
    return replacing(path)
