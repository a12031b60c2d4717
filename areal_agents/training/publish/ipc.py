"""Hands buckets to engines on the same machine: a request carries handles of the memory, not the weights.

A bucket on a GPU travels as a CUDA IPC handle; each engine worker gets that of the trainer's rank on its GPU.
On a CPU the buckets are in shared memory. Both are pickled as torch.multiprocessing does it, in the form in
which SGLang's /update_weights_from_tensor takes flattened buckets.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from areal_agents.errors import EngineError, TrainingError
from areal_agents.inference.engine import Engine, ModelInfo
from areal_agents.training.distributed import Ranks
from areal_agents.training.publish.buckets import Packed
from areal_agents.training.publish.tensors import failures_of

SHARED_MEMORY = Path("/dev/shm")
_DEVICE = 6  # the position of the device among the arguments of torch's rebuild_cuda_tensor


class IpcSender:
    """Sends handles of buckets; implements `piecewise.Sender`. Worker i, counted over all engines in their
    order, is on the GPU of the trainer's rank i."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.sent_bytes = 0
        self._workers: dict[Engine, range] = {}

    async def open(self, engines: Mapping[Engine, ModelInfo], version: int) -> None:
        """Assign the workers of the engines to the trainer's ranks.

        Raises:
            EngineError: there are more workers than ranks on GPUs.
        """
        self.sent_bytes, start = 0, 0
        for engine, info in engines.items():
            known = self._workers.get(engine)
            self._workers[engine] = known or range(start, start + info.workers)
            start = self._workers[engine].stop
        if self._ranks.device.type == "cuda" and start > self._ranks.count:
            raise EngineError(
                f"ipc needs a trainer rank on each engine's GPU: the engines have {start} workers, and the "
                f"trainer has {self._ranks.count} ranks"
            )

    async def send(
        self, engines: Sequence[Engine], bucket: Packed, version: int
    ) -> dict[Engine, EngineError]:
        """Send one bucket's handles; return the failures by engine."""
        payloads = {
            engine: [
                bucket.handles[worker] if bucket.handles else handle(bucket)
                for worker in self._workers[engine]
            ]
            for engine in engines
        }
        results = await asyncio.gather(
            *(
                engine.update_weights_from_tensors(
                    payloads[engine], version, last=bucket.last, form="flattened_bucket"
                )
                for engine in engines
            ),
            return_exceptions=True,
        )
        self.sent_bytes += bucket.header.nbytes
        return failures_of(engines, results)

    async def aclose(self) -> None:
        """There is nothing to release."""


def shared_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return a buffer of uint8 that another process can open.

    Raises:
        TrainingError: there is no room for it in shared memory.
    """
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        free = os.statvfs(SHARED_MEMORY)
        room = free.f_bavail * free.f_frsize
        if nbytes > room:
            raise OSError(f"{room / 1e6:.0f} MB are free")
        _close_files_on_exec()
        storage = torch.UntypedStorage._new_using_filename_cpu(nbytes)
    except (OSError, RuntimeError) as error:
        raise TrainingError(
            f"{SHARED_MEMORY} has no room for a bucket of {nbytes / 1e6:.0f} MB ({error}); transport: ipc "
            "needs two: enlarge it (docker: --shm-size), remove what fills it, or set publish.bucket_mb"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _close_files_on_exec() -> None:
    """Keep the files of this process from torch_shm_manager, which torch starts with the first buffer.

    It lives until every process that opened a buffer has ended, engines included. A pipe that it held would
    not end with this process, and whoever waits for that would wait on.
    """
    files = Path("/proc/self/fd")
    for name in os.listdir(files) if files.is_dir() else ():
        with suppress(OSError):  # the one that listed them is closed
            if int(name) > 2:
                os.set_inheritable(int(name), False)


def handed(buckets: Iterator[Packed], ranks: Ranks) -> Iterator[Packed]:
    """The buckets with the handles of all ranks, on GPUs. Collective: every rank exhausts it.

    No rank fills a buffer again before the first rank is done with it.
    """
    for bucket in buckets:
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
            bucket = replace(bucket, handles=tuple(ranks.gather(handle(bucket))))
        yield bucket
        ranks.barrier()  # the first rank comes here when the bucket before this one was received


def handle(bucket: Packed) -> str:
    """The base64 form of a pickled {"flattened_tensor": …, "metadata": …}; every receiver needs its own."""
    metadata, start = [], 0
    for name, tensor in bucket.tensors():
        end = start + tensor.nbytes
        metadata.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end,
                numel=tensor.nbytes,
            )
        )  # fmt: skip
        start = end
    file = io.BytesIO()
    _Pickler(file).dump({"flattened_tensor": bucket.data, "metadata": metadata})
    return base64.b64encode(file.getvalue()).decode()


class _Pickler(pickle.Pickler):
    """Pickles tensors as handles, in the form that SGLang unpickles."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            rebuild, arguments = reductions.reduce_tensor(value)
            if value.is_cuda:  # devices have other numbers in other processes
                uuid = str(torch.cuda.get_device_properties(value.device).uuid)
                arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
            return rebuild, arguments
        if isinstance(value, torch.TypedStorage):
            return reductions.reduce_typed_storage(value)
        if isinstance(value, torch.UntypedStorage):
            manager, name, size = value._share_filename_cpu_()
            value._shared_incref()  # the receiver takes it back
            return reductions.rebuild_storage_filename, (type(value), manager, name, size)
        return NotImplemented
