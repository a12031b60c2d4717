"""What each of two ranks does in test_ipc, where one of them may fail: spawned, so importable by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.publish import ipc
from areal_agents.training.publish.buckets import packed

COUNT = 2
FAILURES = ("nothing", "sending", "packing")
SHAPES = {f"w{number}": (25,) for number in range(6)}  # 100 bytes each, two in a bucket


def weights(group: Ranks, fails: str) -> Iterator[tuple[str, Tensor]]:
    for number, (name, shape) in enumerate(SHAPES.items()):
        if fails == "packing" and number == 3 and not group.is_first:
            raise ValueError("the second rank cannot pack")
        yield name, torch.full(shape, float(number))


def hand_over(group: Ranks, fails: str) -> tuple[list[list[bool]], str, list[str]]:
    """Which ranks had handles of each bucket; how it ended; and what is left in shared memory."""
    seen, ended = [], "whole"
    handles = ipc.Handles()
    buckets = packed(
        weights(group, fails), SHAPES, dtype=torch.float32, bucket_bytes=200, make_buffer=ipc.shared_buffer
    )
    try:
        with closing(ipc.handed(buckets, group, handles, {1})) as handed:
            for number, bucket in enumerate(handed):
                seen.append([bool(made) for made in bucket.handles])
                if fails == "sending" and number == 1 and group.is_first:
                    raise ValueError("the first rank cannot send")
    except (ValueError, TrainingError) as error:
        ended = str(error)
        error.__traceback__ = None  # it holds the buffers
    handles.give_back(())
    group.barrier()  # the ranks are still in step
    del buckets, handed
    bucket = None  # noqa: F841 - it holds a buffer
    return seen, ended, [name for name in os.listdir(ipc.SHARED_MEMORY) if f"torch_{os.getpid()}_" in name]


def main(rank: int, port: int, out: str) -> None:
    """Hand buckets over, while nothing and while each rank fails."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(COUNT), RANK=str(rank))
    with ranks("cpu", timeout_s=60) as group:
        results = {fails: hand_over(group, fails) for fails in FAILURES}
    torch.save(results, Path(out) / f"{rank}.pt")
