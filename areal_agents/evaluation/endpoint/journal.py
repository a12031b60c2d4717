"""The ended attempts of an evaluation of an endpoint, one line each; they survive the death of the process.

Only the process that plays writes. A line that a killed one left unfinished is not read, and is removed at
the next start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_agents.core.conversations import conversations
from areal_agents.core.rollout import Split
from areal_agents.evaluation.results import AttemptResult, attempt_of
from areal_agents.rewards import FinishedEpisode

JOURNAL = "attempts.jsonl"  # its name in the folder of an evaluation


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One ended attempt.

    Attributes:
        task: the task, {"id", "input"}.
        turns: its calls, each with id, parent, new_messages and reply, as GET /episodes/{id} has them. A turn
            without a parent also has the tools that it was offered, which are those of all that continue it.
        split: "eval", unless the task is there to be trained on.
    """

    task: Mapping[str, Any]
    result: AttemptResult
    turns: tuple[Mapping[str, Any], ...] = field(default=())
    split: Split = "eval"

    @property
    def key(self) -> tuple[str, int]:
        """The task id and the attempt."""
        return self.task["id"], self.result.index

    def finished(self) -> FinishedEpisode:
        """Return what a function of finished episodes is given."""
        return FinishedEpisode(
            id=self.result.episode,
            task=self.task["input"],
            branches=tuple(conversations(self.turns)),
            status=self.result.status,
            rewards=self.result.rewards,
        )


def read_journal(path: Path) -> dict[tuple[str, int], JournalEntry]:
    """Return the last whole entry of each (task id, attempt), also while they are played."""
    entries = (_entry(json.loads(line)) for line in _whole_lines(path).splitlines())
    return {entry.key: entry for entry in entries}


class Journal:
    """The file of ended attempts, for the process that plays them; `latest` is as of `read_journal`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists() and path.stat().st_size != (whole := len(_whole_lines(path))):
            os.truncate(path, whole)
        self.latest = read_journal(path)

    def add(self, entry: JournalEntry) -> None:
        """Append an attempt; it is on the disk when this returns."""
        with open(self._path, "ab") as file:
            # ASCII, because a reply may have a lone surrogate, which has no UTF-8.
            file.write(json.dumps(asdict(entry)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.latest[entry.key] = entry


def _whole_lines(path: Path) -> bytes:
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def _entry(tree: Mapping[str, Any]) -> JournalEntry:
    split = tree.get("split", "eval")  # journals of earlier versions have only evaluations
    return JournalEntry(tree["task"], attempt_of(tree["result"]), tuple(tree["turns"]), split)
