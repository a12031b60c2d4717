"""A gloo backend for the device group, which records when each of its collectives began and ended.

On a CPU both the device group and the control group use gloo; this backend tells them apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "recording"

Span = tuple[str, float, float]  # name, begin and end, by the machine's monotonic clock


class RecordingGroup(dist.ProcessGroup):
    """A gloo process group whose collectives complete before the call returns."""

    spans: list[Span] = []  # of all groups of this process

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.inner = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.inner._register_backend(torch.device("cpu"), kind, gloo)
        self.inner._set_default_backend(kind)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


def _recorded(name: str) -> Callable[..., Any]:
    def call(self: RecordingGroup, *arguments: Any) -> Any:
        began = time.monotonic()
        work = getattr(self.inner, name)(*arguments)
        work.wait()
        RecordingGroup.spans.append((name, began, time.monotonic()))
        return work

    return call


for _name in (
    "all_gather_single", "all_to_all_single", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall_base", "barrier",
    "broadcast", "gather", "recv", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
):  # fmt: skip
    if hasattr(dist.ProcessGroup, _name):  # names differ between versions of PyTorch
        setattr(RecordingGroup, _name, _recorded(_name))


def register() -> None:
    """Register the backend, so that `init_process_group(NAME)` accepts it."""
    dist.Backend.register_backend(NAME, RecordingGroup, devices=["cpu"])
