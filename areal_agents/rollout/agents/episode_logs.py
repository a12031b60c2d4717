"""The logs of commands: one file for each episode, of which the newest are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KEPT_LOGS = 500  # logs of episodes that a process keeps


class EpisodeLogs:
    """Opens a log for each episode, and deletes the oldest one if there are too many."""

    def __init__(self, folder: Path | None) -> None:
        """Args:
        folder: where the logs are, each in ID.log; None: there are none.
        """
        self._folder = folder
        self._kept: deque[Path] = deque()

    def create(self, episode: str) -> Path | None:
        """Create an empty log for something else to write; return its path, or None if no logs are kept."""
        if self._folder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{episode}.log"
        self._kept.append(path)
        if len(self._kept) > KEPT_LOGS:
            self._kept.popleft().unlink(missing_ok=True)
        path.touch()
        return path

    @contextmanager
    def opened(self, episode: str) -> Iterator[BinaryIO | None]:
        """Open the log of an episode inside the block."""
        path = self.create(episode)
        if path is None:
            yield None
            return
        with open(path, "wb", buffering=0) as log:
            yield log
