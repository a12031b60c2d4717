"""What the ranks tell one another besides tensors of the model: batches, decisions, and "I am ready".

It goes through a gloo group on the CPU. A rank that waits here has nothing running on its GPU, whose memory
and cores an engine may be using. The first rank waits for the others at most for the time limit. The others
wait for the first rank as long as it waits for rollouts and engines, which it does within limits of its own.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_agents.errors import TrainingError

T = TypeVar("T")

_WAIT_FOR_FIRST_S = 86_400.0
_ANSWER_S, _POLL_S = 5.0, 0.1  # how long a rank that failed waits for the others to fail too


class RanksLost(TrainingError):
    """Another rank ended, or did not come to an operation of all ranks within the time limit."""


class Control:
    """The control group of all ranks. Every method is collective; each raises RanksLost, which names the
    ranks that are missing.

    Args:
        timeout_s: the longest that the first rank waits for the others.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        limit_s = timeout_s if self._rank == 0 else max(timeout_s, _WAIT_FOR_FIRST_S)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
        self._store = self._group.get_group_store()
        self._begun = 0

    def broadcast(self, value: T) -> T:
        """Return the first rank's value on every rank, pickled."""
        box = [value]
        with self._operation():
            dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def scatter(self, parts: Sequence[T] | None) -> T:
        """Return on rank r the first rank's `parts[r]`; the other ranks pass None.

        The bytes of NumPy arrays are sent as they are, without a copy.
        """
        with self._operation():
            if parts is None:
                return self._receive()
            for rank in range(1, self._count):
                for tensor in _message(parts[rank]):
                    dist.send(tensor, dst=rank, group=self._group)
        return parts[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on every rank, pickled."""
        found: list[Any] = [None] * self._count
        with self._operation():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        found = torch.tensor(int(flag), dtype=torch.int32)
        with self._operation():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found.item())

    def barrier(self) -> None:
        """Wait for every rank."""
        self.any(False)

    def lost(self, error: BaseException) -> RanksLost:
        """Return the error to raise after `error`, the failure of an operation of all ranks."""
        missing = self._missing() or self._silent()
        if missing:
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            what = f"{who} of {self._count} ended or did not come within the time limit"
        else:
            what = f"all {self._count} ranks are there, but cannot reach one another"
        return RanksLost(
            f"rank {self._rank}: {what} (trainer.rank_timeout_s). The run can be resumed from its last "
            f"checkpoint. The failure on this rank: {error}"
        )

    def _receive(self) -> Any:
        sizes = torch.empty(int(self._received(torch.empty(1, dtype=torch.int64))), dtype=torch.int64)
        pieces = [
            self._received(torch.empty(size, dtype=torch.uint8)).numpy().data
            for size in self._received(sizes).tolist()
        ]
        return pickle.loads(pieces[0], buffers=pieces[1:])

    def _received(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            dist.recv(tensor, src=0, group=self._group)
        return tensor

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Tell the other ranks that this rank has come to its next operation, and translate a failure."""
        try:
            self._arrive()
            yield
        except RuntimeError as error:
            raise self.lost(error) from error

    def _arrive(self) -> None:
        self._begun += 1
        self._store.set(_arrivals(self._rank), str(self._begun))

    def _missing(self) -> list[int]:
        """Return the ranks that have not come as far as this one. The first rank's machine keeps the store,
        so without an answer that rank is missing."""
        try:
            return [rank for rank in range(self._count) if self._operations(rank) < self._begun]
        except RuntimeError:
            return [0]

    def _silent(self) -> list[int]:
        """Return the ranks that do not come here as well; those that still run fail too, and come."""
        try:
            self._arrive()
        except RuntimeError:
            return [0]
        deadline = time.monotonic() + _ANSWER_S
        while (missing := self._missing()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return missing

    def _operations(self, rank: int) -> int:
        """Return the number of operations that a rank has come to."""
        key = _arrivals(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _arrivals(rank: int) -> str:
    return f"arrivals/{rank}"


def _message(value: object) -> list[Tensor]:
    """Return the tensors that `Control._receive` expects: the number of pieces, their sizes, the pieces."""
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    pieces = [_as_tensor(header), *(_as_tensor(buffer.raw()) for buffer in buffers)]
    sizes = torch.tensor([piece.numel() for piece in pieces], dtype=torch.int64)
    return [torch.tensor([len(pieces)]), sizes, *(piece for piece in pieces if piece.numel())]


def _as_tensor(data: bytes | memoryview) -> Tensor:
    array = np.frombuffer(data, np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
