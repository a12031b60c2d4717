"""The ranks of one trainer, started by torchrun or single.

There is always a process group and a mesh, so that one rank and many run the same code. Weights are sharded
over all ranks, or over groups of ranks that each hold a copy (HSDP). With context parallelism, neighbouring
ranks share the tokens of one micro-batch and count as one data rank. Several ranks also have a control group
on the CPU; only tensors of the model and of the loss go through the group of the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal_agents.errors import TrainingError
from areal_agents.training.control import Control, RanksLost
from areal_agents.training.process_group import process_group
from areal_agents.training.shared_memory import explained
from areal_agents.version import __version__

T = TypeVar("T")

_TIMEOUT_S = 1800.0
_NEWS_S = 5.0  # how long after a failed collective the news that a rank is lost may arrive


@dataclass(frozen=True, slots=True)
class Ranks:
    """The position of this process among the ranks of the trainer.

    Attributes:
        rank, count: this process's rank and the number of ranks; gradients are averaged over all ranks.
        count_here: the number of ranks on this machine.
        mesh: the device mesh over which the weights are sharded: [count], or [replicas, count / replicas].
        data_rank, data_count: select this rank's micro-batches: `batches[data_rank::data_count]`.
        context_rank, context_count, context_group: this rank's index among the ranks that share each of its
            micro-batches, their number and process group; the group is None if there is one rank.
        control: the control group; None if there is one rank.
    """

    rank: int
    count: int
    device: torch.device
    mesh: DeviceMesh
    data_rank: int
    data_count: int
    context_rank: int = 0
    context_count: int = 1
    context_group: dist.ProcessGroup | None = None
    control: Control | None = None
    count_here: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank uses the store and the engines."""
        return self.rank == 0

    @property
    def shards(self) -> int:
        """The number of ranks over which each copy of the weights is divided."""
        return int(self.mesh.shape[-1])

    def broadcast(self, value: T) -> T:
        """Return the first rank's value on every rank, pickled, through the control group."""
        return value if self.control is None else self.control.broadcast(value)

    def scatter(self, parts: Sequence[T] | None) -> T:
        """Return on rank r the first rank's `parts[r]`, through the control group; the other ranks pass
        None."""
        if self.control is None:
            assert parts is not None
            return parts[0]
        return self.control.scatter(parts)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on every rank, through the control group."""
        return [value] if self.control is None else self.control.gather(value)

    def from_first(self, call: Callable[[], T]) -> T:
        """Return on every rank what `call` returns on the first, where alone it is made.

        Raises:
            TrainingError, ValueError: on every rank, if the call raises one.
        """
        result: T | TrainingError | ValueError | None = None
        if self.is_first:
            try:
                result = call()
            except (TrainingError, ValueError) as error:
                result = error
        told = self.broadcast(result)
        if isinstance(told, TrainingError | ValueError):
            raise told
        return cast(T, told)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks."""
        if self.count > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over ranks."""
        if self.count > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank, through the control group."""
        return flag if self.control is None else self.control.any(flag)

    def barrier(self) -> None:
        """Wait for every rank, in the control group."""
        if self.control is not None:
            self.control.barrier()


def use_threads(threads: int) -> None:
    """Set the number of CPU threads of torch in this process. 0: the ranks of one machine (torchrun's
    LOCAL_WORLD_SIZE) divide the threads that torch would use, which OMP_NUM_THREADS sets."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads or ranks_here > 1:
        torch.set_num_threads(threads or max(1, torch.get_num_threads() // ranks_here))


def own_nccl() -> str | None:
    """Return the version of this process's NCCL, as 2.28.9; None without a GPU."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def own_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count()


@contextmanager
def ranks(
    device: str = "auto",
    *,
    timeout_s: float = _TIMEOUT_S,
    join_timeout_s: float = 600.0,
    facts: Mapping[str, str] | None = None,
    replicas: int = 1,
    context: int = 1,
) -> Iterator[Ranks]:
    """Join the process group described by torchrun's environment, or create a group of one rank.

    The group is destroyed at the end if this call created it.

    Args:
        timeout_s: the longest that a rank waits for the others in a collective, and the first rank in the
            control group.
        join_timeout_s: the longest wait until all ranks have registered.
        facts: what must be the same on every rank, by name; versions of software are added.
        replicas: copies of the weights; each is sharded over count / replicas neighbouring ranks.
        context: neighbouring ranks that share the tokens of a micro-batch.

    Raises:
        ValueError: the ranks do not divide into that many replicas, or into groups of `context`.
        TrainingError: a rank did not register in time, or differs from the first one in its facts.
        TrainingError: within the block, NCCL had no room in shared memory.
        RanksLost: within the block, another rank ended or did not come to a collective in time.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    here = torch.device(kind)
    if kind == "cuda":
        index, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= gpus:
            raise TrainingError(
                f"local rank {index} needs a GPU of its own, and this machine has {gpus}; start at most one "
                "rank per GPU (trainer.ranks, trainer.nodes)"
            )
        here = torch.device(kind, index)
        torch.cuda.set_device(here)
    with process_group(
        "nccl" if kind == "cuda" else "gloo",
        timeout_s=timeout_s,
        join_timeout_s=join_timeout_s,
        facts={**(facts or {}), **_software(kind)},
    ) as watch:
        joined: Ranks | None = None
        try:
            joined = _divide(here, replicas=replicas, context=context, timeout_s=timeout_s)
            yield joined
        except (RuntimeError, RanksLost) as error:
            if isinstance(error, RuntimeError) and not _is_collective_failure(error):
                raise
            reason = explained(error)
            if watch is not None and (news := watch.news(_NEWS_S)) is not None:
                raise RanksLost(
                    f"{news}. The run can be resumed from its last checkpoint. The failure on this rank: "
                    f"{reason}"
                ) from error
            if reason != str(error):
                raise TrainingError(reason) from error
            if isinstance(error, RanksLost) or joined is None or joined.control is None:
                raise
            raise joined.control.lost(error) from error


def _software(kind: str) -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    nccl = {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))} if kind == "cuda" else {}
    return {"areal-agents": __version__, "PyTorch": torch.__version__, "device": kind, **nccl}


def _is_collective_failure(error: RuntimeError) -> bool:
    """Whether a collective raised it. gloo raises errors of no type of their own; they name a file of
    gloo."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def _divide(device: torch.device, *, replicas: int, context: int, timeout_s: float) -> Ranks:
    """Return the groups of this rank. Collective: every rank creates the same groups in the same order."""
    rank, count = dist.get_rank(), dist.get_world_size()
    for name, size in (("replicas", replicas), ("context_parallel", context)):
        if size < 1 or count % size:
            raise ValueError(f"{name}: expected a divisor of the {count} ranks, got {size}")
    mesh = (
        init_device_mesh(device.type, (count,))
        if replicas == 1
        else init_device_mesh(
            device.type, (replicas, count // replicas), mesh_dim_names=("replicate", "shard")
        )
    )
    group = None
    if context > 1:
        names = ("data", "context")
        group = init_device_mesh(device.type, (count // context, context), mesh_dim_names=names).get_group(
            "context"
        )
    return Ranks(
        rank=rank,
        count=count,
        device=device,
        mesh=mesh,
        data_rank=rank // context,
        data_count=count // context,
        context_rank=rank % context,
        context_count=context,
        context_group=group,
        control=Control(timeout_s=timeout_s) if count > 1 else None,
        count_here=int(os.environ.get("LOCAL_WORLD_SIZE", count)),
    )
