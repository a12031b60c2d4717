"""The program of the two ranks in test_ipc, one of which may fail; spawned processes import it by name."""

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
    """Yield the weights, which the ranks gather together; one on the second rank may have a wrong size."""
    for number, (name, shape) in enumerate(SHAPES.items()):
        group.barrier()
        is_wrong = fails == "packing" and number == 2 and not group.is_first
        yield name, torch.full((26,) if is_wrong else shape, float(number))


def hand_over(group: Ranks, fails: str) -> tuple[list[list[bool]], str, list[str]]:
    """Return which ranks had handles of each bucket, how the transfer ended, and what is in shared memory."""
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
        error.__traceback__ = None  # the traceback holds the buffers
    exhaust(gathered, None)  # as every rank does, in step with the others
    handles.give_back(())
    group.barrier()  # the ranks are still in step
    del buckets, handed, buffers
    bucket = None  # noqa: F841 - the variable holds a buffer
    return seen, ended, [name for name in os.listdir(ipc.SHARED_MEMORY) if f"torch_{os.getpid()}_" in name]


def main(rank: int, port: int, out: str) -> None:
    """Hand over buckets, first without a failure, and then with a failure on each rank."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(COUNT), RANK=str(rank))
    with ranks("cpu", timeout_s=60) as group:
        results = {fails: hand_over(group, fails) for fails in FAILURES}
    torch.save(results, Path(out) / f"{rank}.pt")
