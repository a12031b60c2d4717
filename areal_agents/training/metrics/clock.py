"""Measures the wall-clock seconds of each part of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up the time spent in each named part.

    On a GPU a part ends when its work is complete, not when it has been launched.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the with-block; the times of blocks with the same name add up."""
        started = time.monotonic()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
