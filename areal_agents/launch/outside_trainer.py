"""Watches for the trainer of a run that something else starts (`trainer.start: false`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from areal_agents.errors import ArealAgentsError
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store.trainer_lock import TrainerLock

LOOK_S = 2.0
SAY_S = 30.0


class OutsideTrainer:
    """Says for how long the run has waited for a trainer, and ends it if none comes.

    A trainer holds the lock of the store from when its ranks have met until it ends, however it ends.

    Args:
        store: the URL or path of the store.
        limit_s: longest time without a trainer.
        has_ended: whether the training is complete, so that no trainer is needed.
        say: called with each message.
        now: the time in seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        store: str | Path,
        *,
        limit_s: float,
        has_ended: Callable[[], bool],
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = f"areal-agents processes trainer --folder {folder.root}"
        self._lock = TrainerLock.of(store)
        self._limit_s, self._has_ended, self._say, self._now = limit_s, has_ended, say, now
        self._alone_since = self._said = now()
        self._looked = -LOOK_S
        self._looks_held = 0
        self._is_there = False

    def check(self) -> None:
        """Look for the trainer; cheap enough to be called all the time.

        Raises:
            ArealAgentsError: there has been none for too long.
        """
        now = self._now()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self._has_ended():
            return
        with self._lock.unheld() as is_free:
            pass
        self._looks_held = 0 if is_free else self._looks_held + 1
        # One look may find the lock held by a process that only checks it, too.
        if self._looks_held > 1 and not self._is_there:
            self._say("the trainer has been started")
            self._is_there = True
        if not is_free:
            return
        if self._is_there:
            self._is_there = False
            self._alone_since = now
            self._said = now - SAY_S
        waited_s = now - self._alone_since
        if waited_s >= self._limit_s:
            raise ArealAgentsError(
                f"no trainer has been started for {waited_s:.0f} s (trainer.join_timeout_s); start each of "
                f"its ranks as {self._command}, or leave trainer.start out"
            )
        if now - self._said >= SAY_S:
            self._said = now
            self._say(
                f"waiting for the trainer, which something else starts as {self._command}: {waited_s:.0f} s "
                f"of at most {self._limit_s:.0f} s"
            )
