"""The logs of commands: one file for each episode, of which the last to end are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KEPT_LOGS = 500  # logs of ended episodes that a process keeps


class EpisodeLogs:
    """Opens a log for each episode, and deletes logs of ended episodes if there are too many."""

    def __init__(self, folder: Path | None) -> None:
        """Args:
        folder: where the logs are, each in ID.log; None: there are none.
        """
        self._folder = folder
        self._ended: deque[Path] = deque()

    def create(self, episode: str) -> Path | None:
        """Create an empty log for something else to write; return its path, or None if no logs are kept.

        It is kept until KEPT_LOGS other episodes have ended after `end` was called.
        """
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{episode}.log"
        path.touch()
        return path

    def end(self, episode: str) -> None:
        """Let the log of an episode be deleted, when KEPT_LOGS other episodes have ended after it."""
        if self._folder is not None:
            self._ended.append(self._folder / f"{episode}.log")
            if len(self._ended) > KEPT_LOGS:
                self._ended.popleft().unlink(missing_ok=True)

    @contextmanager
    def opened(self, episode: str) -> Iterator[BinaryIO | None]:
        """Open the log of an episode inside the block."""
        path = self.create(episode)
        if path is None:
            yield None
            return
        try:
            with open(path, "wb", buffering=0) as log:
                yield log
        finally:
            self.end(episode)
