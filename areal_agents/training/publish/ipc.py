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
import struct
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
from areal_agents.training.shared_memory import REMEDY, SHARED_MEMORY, free_bytes

_DEVICE = 6  # the position of the device among the arguments of torch's rebuild_cuda_tensor
_COUNTER = slice(11, 13)  # and that of the counter of references, a file and a place in it
_REFERENCES = struct.Struct("i")  # what a file of torch in shared memory begins with
_OTHER_FAILED = "another rank failed while weights were sent; see its log"


class IpcSender:
    """Sends handles of buckets; implements `piecewise.Sender`. A worker of an engine gets the handle of the
    trainer's rank on its own GPU.

    Args:
        engines: all engines of the run, in order, whether they answer or not.
        gpus: the GPUs of each engine's workers, on the machine whose GPU r is that of rank r. If they are not
            known, worker i of all workers, counted in the order of the engines, is on the GPU of rank i.

    Attributes:
        opened: the handles that engines have opened since `open`.
    """

    def __init__(
        self,
        ranks: Ranks,
        handles: Handles,
        *,
        engines: Sequence[Engine],
        gpus: Sequence[Sequence[int]] = (),
    ) -> None:
        if gpus and len(gpus) != len(engines):
            raise ValueError(f"expected the GPUs of {len(engines)} engines, got {len(gpus)}")
        self._ranks, self._handles = ranks, handles
        self._engines, self._gpus = tuple(engines), tuple(gpus)
        self.sent_bytes = 0
        self.opened: set[str] = set()
        self._workers: dict[Engine, Sequence[int]] = {}

    @property
    def receiving(self) -> frozenset[int]:
        """The ranks whose memory engines read."""
        return frozenset(rank for workers in self._workers.values() for rank in workers)

    async def open(self, engines: Mapping[Engine, ModelInfo], version: int) -> None:
        """Find the rank of each worker.

        Raises:
            EngineError: a worker is on no rank's GPU, or its GPU is not known.
        """
        self.sent_bytes, self.opened, self._workers = 0, set(), {}
        if self._ranks.device.type != "cuda":
            self._workers = {engine: (0,) * info.workers for engine, info in engines.items()}
            return
        widths = {info.workers for info in engines.values()}
        if not self._gpus and len(widths) > 1:
            raise EngineError(
                "ipc cannot know which GPUs running servers of different sizes are on: they have "
                f"{', '.join(map(str, sorted(widths)))} workers; use servers of one size, or another "
                "transport"
            )
        workers = {engine: self._ranks_of(engine, info.workers) for engine, info in engines.items()}
        for engine, found in workers.items():
            if max(found) >= self._ranks.count_here:
                raise EngineError(
                    f"ipc needs a trainer rank on each engine's GPU: {engine.base_url} has a worker on GPU "
                    f"{max(found)}, and the trainer has {self._ranks.count_here} ranks on this machine, one "
                    "per GPU from 0 on"
                )
        self._workers = workers

    def _ranks_of(self, engine: Engine, workers: int) -> Sequence[int]:
        place = self._engines.index(engine)
        if not self._gpus:
            return range(place * workers, (place + 1) * workers)
        if len(self._gpus[place]) != workers:
            raise EngineError(
                f"{engine.base_url} has {workers} workers, and was started on {len(self._gpus[place])} GPUs"
            )
        return self._gpus[place]

    async def send(
        self, engines: Sequence[Engine], bucket: Packed, version: int
    ) -> dict[Engine, EngineError]:
        """Send one bucket's handles; return the failures by engine."""
        payloads = {
            engine: [
                bucket.handles[rank] if bucket.handles else self._handles.make(bucket)
                for rank in self._workers[engine]
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
        failures = failures_of(engines, results)
        self.opened.update(*(payloads[engine] for engine in engines if engine not in failures))
        return failures

    async def aclose(self) -> None:
        """There is nothing to release."""


class Handles:
    """The handles that this rank has made of its buckets. Each holds a reference to its buffer, which the
    process that opens it gives back; `give_back` does so for those that nobody has opened."""

    def __init__(self) -> None:
        self._made: dict[str, Callable[[], None]] = {}  # handle -> gives its reference back

    def make(self, bucket: Packed) -> str:
        """Return a new handle of the bucket; every receiver needs its own."""
        payload, give_back = handle(bucket, number=len(self._made))
        self._made[payload] = give_back
        return payload

    def give_back(self, opened: Collection[str]) -> None:
        """Give back the reference of each handle that is not among `opened`, and forget all handles."""
        made, self._made = self._made, {}
        for payload, give_back in made.items():
            if payload not in opened:
                give_back()


def shared_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return a buffer of uint8 that another process can open.

    Raises:
        TrainingError: there is no room for it in shared memory.
    """
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        if nbytes > (free := free_bytes()):
            raise OSError(f"{free / 1e6:.0f} MB are free")
        _close_files_on_exec()
        storage = torch.UntypedStorage._new_using_filename_cpu(nbytes)
    except (OSError, RuntimeError) as error:
        raise TrainingError(
            f"{SHARED_MEMORY} has no room for a bucket of {nbytes / 1e6:.0f} MB ({error}); transport: ipc "
            f"needs two; {REMEDY}, or set publish.bucket_mb"
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


def handed(
    buckets: Iterator[Packed], ranks: Ranks, handles: Handles, receiving: Collection[int]
) -> Generator[Packed]:
    """Yield each bucket with a handle of it from every rank in `receiving`. Collective: every rank iterates
    to the end, or closes the generator.

    Every rank waits at each bucket until the first rank requests the next one. The first rank does so when
    engines have received the bucket before, so no buffer is overwritten while an engine reads it. A rank that
    fails, or closes the generator early, makes all others raise at the same bucket.

    Raises:
        TrainingError: another rank has failed.
    """
    while True:
        bucket: Packed | None = None
        failure: Exception | None = None
        made = ""
        try:
            bucket = next(buckets, None)
            if bucket is not None and ranks.rank in receiving:
                if ranks.device.type == "cuda":
                    torch.cuda.synchronize(ranks.device)
                made = handles.make(bucket)
        except Exception as error:
            failure = error
        found = ranks.gather((made, failure is not None))
        if failure is not None:
            raise failure
        if any(has_failed for _, has_failed in found):
            raise TrainingError(_OTHER_FAILED)
        if bucket is None:
            return
        is_sent = False
        try:
            yield replace(bucket, handles=tuple(made for made, _ in found))
            is_sent = True  # the first rank comes here when the bucket before this one was received
        finally:
            has_ended = ranks.any(not is_sent)
        if has_ended:
            raise TrainingError(_OTHER_FAILED)


def handle(bucket: Packed, *, number: int = 0) -> tuple[str, Callable[[], None]]:
    """Return the base64 form of a pickled {"flattened_tensor": …, "metadata": …, "number": …}, and a call
    that gives back what it holds if nobody opens it.

    Args:
        number: makes two handles of one bucket differ; engines ignore it.
    """
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
    pickler = _Pickler(file)
    pickler.dump({"flattened_tensor": bucket.data, "metadata": metadata, "number": number})
    assert pickler.give_back is not None, "a bucket has a storage"
    return base64.b64encode(file.getvalue()).decode(), pickler.give_back


class _Pickler(pickle.Pickler):
    """Pickles one tensor as a handle, in the form that SGLang unpickles.

    Attributes:
        give_back: gives back the reference that the handle holds.
    """

    give_back: Callable[[], None] | None = None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            rebuild, arguments = reductions.reduce_tensor(value)
            if value.is_cuda:
                self.give_back = partial(
                    torch.UntypedStorage._release_ipc_counter, *arguments[_COUNTER], device=value.device
                )
                # devices have other numbers in other processes
                uuid = str(torch.cuda.get_device_properties(value.device).uuid)
                arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
            return rebuild, arguments
        if isinstance(value, torch.TypedStorage):
            return reductions.reduce_typed_storage(value)
        if isinstance(value, torch.UntypedStorage):
            manager, name, size = value._share_filename_cpu_()
            value._shared_incref()  # the receiver takes it back
            self.give_back = partial(_give_back, value, SHARED_MEMORY / name.decode().lstrip("/"))
            return reductions.rebuild_storage_filename, (type(value), manager, name, size)
        return NotImplemented


def _give_back(storage: torch.UntypedStorage, file: Path) -> None:
    """Give back a reference to a buffer in shared memory, unless its receiver, which failed later, has."""
    with file.open("rb") as opened:
        (references,) = _REFERENCES.unpack(opened.read(_REFERENCES.size))
    if references > 1:  # one is this process's own
        storage._shared_decref()
