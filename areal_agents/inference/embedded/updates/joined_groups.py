"""The process groups that this engine has joined, and what it receives through them.

Calls that wait for another process run in a daemon thread with a time limit, so they block neither the event
loop nor generation nor the exit of this process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from areal_agents.errors import EngineError, RequestError
from areal_agents.inference.embedded.updates.process_group import join_group, leave_group
from areal_agents.inference.engine import WeightBucket, WeightGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """This engine in one group; broadcasts are received in the order in which they were requested."""

    group: dist.ProcessGroup
    device: torch.device
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class WeightGroups:
    """Groups by name. `timeout_s` bounds joining one, and each broadcast in it."""

    def __init__(self, *, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._members: dict[str, _Member] = {}

    async def join(self, group: WeightGroup) -> None:
        """Return when all members have joined; EngineError if they do not within the time limit."""
        if group.name in self._members:
            raise RequestError(f"the weight group {group.name} is already joined; use a new name")
        if group.backend == "nccl" and self._device.type != "cuda":
            raise RequestError("backend nccl needs an engine on a GPU; use gloo")
        made = await _in_thread(lambda: join_group(group, rank=group.rank_offset, timeout_s=self._timeout_s))
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        self._members[group.name] = _Member(made, device)

    async def receive(self, name: str, bucket: WeightBucket) -> Tensor:
        """Receive one broadcast of rank 0, uint8 [bucket.nbytes]; EngineError if it fails."""
        member = self._members.get(name)
        if member is None:
            raise RequestError(f"the weight group {name} was not joined; joined are {sorted(self._members)}")

        def receive() -> Tensor:
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=member.device)
            dist.broadcast(flat, src=0, group=member.group)
            return flat

        async with member.turn:
            try:
                return await _in_thread(receive)
            except RuntimeError as error:  # raised by torch's backends
                raise EngineError(f"nothing was received from the weight group {name}: {error}") from error

    def leave(self, name: str) -> None:
        """Leave a group; calls that still wait in it time out."""
        member = self._members.pop(name, None)
        if member is None:
            raise RequestError(f"the weight group {name} does not exist here")
        leave_group(member.group)


async def _in_thread(function: Callable[[], T]) -> T:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(future))
