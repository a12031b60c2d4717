"""The ended attempts of an evaluation of an endpoint, one line each; they survive the death of the process.

A line that a killed process left unfinished is removed at the next start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_agents.core.conversations import conversations
from areal_agents.evaluation.results import AttemptResult, attempt_of
from areal_agents.rewards import FinishedEpisode


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One ended attempt.

    Attributes:
        task: the task, {"id", "input"}.
        turns: its calls, each with id, parent, new_messages and reply, as GET /episodes/{id} has them.
    """

    task: Mapping[str, Any]
    result: AttemptResult
    turns: tuple[Mapping[str, Any], ...] = field(default=())

    def finished(self) -> FinishedEpisode:
        """Return what a function of finished episodes is given."""
        return FinishedEpisode(
            id=self.result.episode,
            task=self.task["input"],
            branches=tuple(conversations(self.turns)),
            status=self.result.status,
            rewards=self.result.rewards,
        )


class Journal:
    """The file of ended attempts; `latest` has the last entry of each (task id, attempt)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.latest: dict[tuple[str, int], JournalEntry] = {}
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            os.truncate(path, len(whole))
        for line in whole.splitlines():
            self._keep(_entry(json.loads(line)))

    def add(self, entry: JournalEntry) -> None:
        """Append an attempt; it is on the disk when this returns."""
        with open(self._path, "ab") as file:
            # ASCII, because a reply may have a lone surrogate, which has no UTF-8.
            file.write(json.dumps(asdict(entry)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._keep(entry)

    def _keep(self, entry: JournalEntry) -> None:
        self.latest[entry.task["id"], entry.result.index] = entry


def _entry(tree: Mapping[str, Any]) -> JournalEntry:
    return JournalEntry(tree["task"], attempt_of(tree["result"]), tuple(tree["turns"]))
