"""What each of two ranks does in test_ipc, where one of them may fail: spawned, so importable by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.publish import ipc
from areal_agents.training.publish.buckets import make_buffers, packed
from areal_agents.training.publish.version_folder import exhaust

COUNT = 2
FAILURES = ("nothing", "sending", "packing")
SHAPES = {f"w{number}": (25,) for number in range(6)}  # 100 bytes each, two in a bucket


def weights(group: Ranks, fails: str) -> Iterator[tuple[str, Tensor]]:
    """The weights, each of which the ranks gather together; the second rank may get one that does not fit."""
    for number, (name, shape) in enumerate(SHAPES.items()):
        group.barrier()
        is_wrong = fails == "packing" and number == 2 and not group.is_first
        yield name, torch.full((26,) if is_wrong else shape, float(number))


def hand_over(group: Ranks, fails: str) -> tuple[list[list[bool]], str, list[str]]:
    """Which ranks had handles of each bucket; how it ended; and what is left in shared memory."""
    seen, ended = [], "whole"
    handles = ipc.Handles()
    size: dict[str, Any] = {"dtype": torch.float32, "bucket_bytes": 200}
    buffers = make_buffers(SHAPES, **size, device=group.device, make=ipc.shared_buffer)
    gathered = weights(group, fails)
    buckets = packed(gathered, SHAPES, **size, buffers=buffers)
    try:
        with closing(ipc.handed(buckets, group, handles, {1})) as handed:
            for number, bucket in enumerate(handed):
                seen.append([bool(made) for made in bucket.handles])
                if fails == "sending" and number == 1 and group.is_first:
                    raise ValueError("the first rank cannot send")
    except (ValueError, RuntimeError, TrainingError) as error:
        ended = str(error)
        error.__traceback__ = None  # it holds the buffers
    exhaust(gathered, None)  # as every rank does, together with the others
    handles.give_back(())
    group.barrier()  # the ranks are still in step
    del buckets, handed, buffers
    bucket = None  # noqa: F841 - it holds a buffer
    return seen, ended, [name for name in os.listdir(ipc.SHARED_MEMORY) if f"torch_{os.getpid()}_" in name]


def main(rank: int, port: int, out: str) -> None:
    """Hand buckets over, while nothing and while each rank fails."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(COUNT), RANK=str(rank))
    with ranks("cpu", timeout_s=60) as group:
        results = {fails: hand_over(group, fails) for fails in FAILURES}
    torch.save(results, Path(out) / f"{rank}.pt")
