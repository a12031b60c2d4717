"""Spawns the ranks of a test, and kills them if they do not end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def spawn(main: Callable[..., None], arguments: tuple[Any, ...], *, count: int, limit_s: float = 500) -> None:
    """Call `main` with a rank and the arguments in `count` processes, and wait until they have ended.

    The limit is below that of a test, so that ranks which wait for each other fail only their own tests.
    """
    spawned = mp.spawn(main, arguments, nprocs=count, join=False)
    deadline = time.monotonic() + limit_s
    try:
        while not spawned.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"the ranks did not end within {limit_s:g} s"
    finally:
        for process in spawned.processes:
            process.kill()
