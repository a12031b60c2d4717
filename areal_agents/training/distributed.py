"""The ranks of one trainer: started by torchrun, or a single one.

There is always a process group and a mesh, so that one rank and many run the same code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks of the trainer."""

    rank: int
    count: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Whether this rank talks to the store and the engine."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """The first rank's value, on every rank (pickled; used once a batch)."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks."""
        if self.count > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The maximum over ranks."""
        if self.count > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.count == 1:
            return flag
        return bool(self.max(torch.tensor(int(flag), device=self.device)).item())

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def ranks(device: str = "auto", *, timeout_s: float = 7200.0) -> Iterator[Ranks]:
    """Join the process group that torchrun's environment describes, or make one of one rank.

    The group is left at the end if this call made it.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    here = torch.device(kind)
    if kind == "cuda":
        here = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(here)
    made = not dist.is_initialized()
    if made:
        backend = "nccl" if kind == "cuda" else "gloo"
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        count = dist.get_world_size()
        yield Ranks(dist.get_rank(), count, here, init_device_mesh(kind, (count,)))
    finally:
        if made:
            dist.destroy_process_group()
