"""Weight transports: engines read a version's folder, or receive buckets that all ranks gather."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from areal_agents.errors import EngineError, EngineUnavailable, TrainingError
from areal_agents.inference.engine import Engine
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.gathering import Shape, published_shapes, whole_weights
from areal_agents.training.model.model import Policy
from areal_agents.training.publish import adapters, disk, ipc
from areal_agents.training.publish.broadcast import BroadcastSender
from areal_agents.training.publish.buckets import MB, Packed, make_buffers, packed, plain_buffer
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.publish.delta import DeltaSender
from areal_agents.training.publish.direct_folders import DirectFolders
from areal_agents.training.publish.disk import Check
from areal_agents.training.publish.fleet import EventLoopThread, Fleet
from areal_agents.training.publish.host_copy import HostCopy
from areal_agents.training.publish.piecewise import Delivery, Sender
from areal_agents.training.publish.preflight import Reachable
from areal_agents.training.publish.rank_failures import on_every_rank
from areal_agents.training.publish.tensors import TensorSender
from areal_agents.training.publish.version_folder import exhaust

logger = logging.getLogger(__name__)

GPU_BUCKET_MB, LEAST_BUCKET_MB = 1000, 64  # an eighth of the GPU's free memory, within these bounds
CPU_BUCKET_MB = 256
_MOST_FAILURES = 3  # versions in a row that reach no engine, after which a transport is given up


@dataclass(frozen=True, slots=True)
class Delivered:
    """The result of a delivery.

    Attributes:
        pause_s: the longest time that an engine did not sample, in seconds.
        repaired: engines that loaded the folder after another transport failed.
        assemble_s: time in seconds in which the weights were gathered and sent.
        sent_bytes: weights sent to the engine that received most, in bytes; 0 if engines read a folder.
    """

    pause_s: float = 0.0
    repaired: int = 0
    assemble_s: float = 0.0
    sent_bytes: int = 0


class Transport(Protocol):
    """Delivers versions to engines; implemented by `FolderTransport` and `BucketTransport`. Every rank has
    one.

    Attributes:
        folder_first: whether the version's folder must be complete before `deliver`. It may change after a
            delivery, on every rank.
    """

    folder_first: bool

    def deliver(
        self, fleet: Fleet, path: Path, reachable: Reachable, check: Check | None, copy: HostCopy | None
    ) -> Delivered:
        """Make `fleet` serve the version whose folder is `path`. Collective; only the first rank's arguments
        and result count.

        Args:
            copy: takes the weights that are sent, unless it has them; not used with `folder_first`.

        Raises:
            EngineUnavailable: on the first rank, every engine was lost; the call may be repeated.
            EnginesLost: on the other ranks in this case.
            EngineError: on the first rank, no engine took the version; on the other ranks, this is a
                TrainingError.
        """
        ...

    def close(self) -> None:
        """Release the resources that the transport holds."""
        ...


def make_transport(
    config: PublishConfig,
    policy: Policy,
    ranks: Ranks,
    loop: EventLoopThread | None,
    folders: DirectFolders,
    *,
    engines: Sequence[Engine],
    engine_gpus: Sequence[Sequence[int]],
) -> Transport:
    """Create the transport that the config selects.

    Args:
        loop, engines: all engines, and what calls them; None and empty on all ranks except the first.
        engine_gpus: the GPUs of each engine's workers; empty if they are not known.

    Raises:
        TrainingError: the transport cannot be used with the trainer's device.
    """
    if config.transport in ("disk", "lora"):
        return FolderTransport(config, ranks, loop)
    handles = ipc.Handles()
    sender = _sender(config, ranks, handles, engines, engine_gpus) if loop is not None else None
    return BucketTransport(config, policy, ranks, loop, folders, sender, handles)


class FolderTransport:
    """The first rank tells engines to load the folder; the other ranks wait for it."""

    folder_first = True

    def __init__(self, config: PublishConfig, ranks: Ranks, loop: EventLoopThread | None) -> None:
        self._config, self._ranks, self._loop = config, ranks, loop

    def deliver(
        self,
        fleet: Fleet,
        path: Path,
        reachable: Reachable,
        check: Check | None,
        copy: HostCopy | None = None,
    ) -> Delivered:
        """See Transport.deliver."""
        return on_every_rank(self._ranks, lambda: self._load(fleet, path, reachable, check))

    def close(self) -> None:
        """See Transport.close."""

    def _load(self, fleet: Fleet, path: Path, reachable: Reachable, check: Check | None) -> Delivered:
        if self._loop is None:
            return Delivered()
        deliver = disk.deliver
        if self._config.transport == "lora":
            deliver = partial(adapters.deliver, may_be_there=reachable.were_lost)
        return Delivered(self._loop.run(deliver(fleet, path, pause=self._config.pause, check=check)))


class BucketTransport:
    """All ranks gather the weights, once; the first rank sends them, and takes the copy that the folder is
    written from.

    If buckets reach no engine at all, the engines load the folder, and after a definite or a repeated failure
    every later version is published like this. An engine that is lost meanwhile is left out, and needs no
    folder now.

    Args:
        loop, sender: exist on the first rank only.
        handles: those that this rank makes, with `ipc`.
    """

    def __init__(
        self,
        config: PublishConfig,
        policy: Policy,
        ranks: Ranks,
        loop: EventLoopThread | None,
        folders: DirectFolders,
        sender: Sender | None,
        handles: ipc.Handles,
    ) -> None:
        self._config, self._policy, self._ranks, self._loop = config, policy, ranks, loop
        self._folders, self._sender, self._handles = folders, sender, handles
        self._loading = FolderTransport(config, ranks, loop)  # after it was given up
        self._failures = 0  # versions in a row that reached no engine by buckets
        self._has_worked = False
        self.folder_first = False

    def deliver(
        self,
        fleet: Fleet,
        path: Path,
        reachable: Reachable,
        check: Check | None,
        copy: HostCopy | None = None,
    ) -> Delivered:
        """See Transport.deliver."""
        if self.folder_first:
            return self._loading.deliver(fleet, path, reachable, check)
        try:
            return self._send(fleet, reachable, check, copy)
        except EngineUnavailable:
            self.close()  # an engine that comes back is not in the process group
            raise

    def close(self) -> None:
        """See Transport.close."""
        if self._loop is not None and self._sender is not None:
            self._loop.run(self._sender.aclose())

    def _send(
        self, fleet: Fleet, reachable: Reachable, check: Check | None, copy: HostCopy | None
    ) -> Delivered:
        weights = whole_weights(self._policy.model, self._policy.lora)
        # computed before the pause, which it would otherwise lengthen
        shapes = published_shapes(self._policy.model)
        delivery: Delivery | None = None
        if self._loop is not None and self._sender is not None:
            pause = self._config.pause
            assert pause != "drain", "PublishConfig refuses drain with bucket transports"
            delivery = Delivery(
                self._loop, fleet, self._sender, infos=reachable.infos, pause=pause, check=check
            )
        # the same on every rank, which hands over its buckets together with the others
        bucket_bytes = self._ranks.broadcast(self._bucket_bytes())
        buffers = on_every_rank(self._ranks, lambda: self._buffers(shapes, bucket_bytes))
        on_every_rank(self._ranks, lambda: delivery.begin() if delivery else None)
        started = time.monotonic()
        receiving = self._receiving()
        on_every_rank(
            self._ranks,
            lambda: self._gather(
                weights, shapes, delivery, copy, fleet.version,
                bucket_bytes=bucket_bytes, buffers=buffers, receiving=receiving,
            ),
        )  # fmt: skip
        buffers.clear()  # every bucket was sent
        self._give_back()
        assemble_s = time.monotonic() - started
        on_every_rank(self._ranks, lambda: delivery.end() if delivery else None)
        if self._ranks.broadcast(delivery is not None and delivery.needs_folder):
            self._repair(delivery)
        elif delivery is not None:
            self._failures, self._has_worked = 0, True
        if delivery is None or self._sender is None:
            return Delivered()
        return Delivered(
            delivery.pause_s,
            len(delivery.repaired),
            assemble_s=assemble_s,
            sent_bytes=self._sender.sent_bytes,
        )

    def _gather(
        self,
        weights: Iterator[tuple[str, Tensor]],
        shapes: Mapping[str, Shape],
        delivery: Delivery | None,
        copy: HostCopy | None,
        version: int,
        *,
        bucket_bytes: int,
        buffers: list[Tensor],
        receiving: frozenset[int],
    ) -> None:
        """Gather the weights and send them. Collective, and so is a failure in it."""
        try:
            buckets = packed(
                weights,
                shapes,
                dtype=self._policy.saved_dtype,
                bucket_bytes=bucket_bytes,
                buffers=buffers,
            )
            with ExitStack() as ends:
                if receiving:
                    handed = ipc.handed(buckets, self._ranks, self._handles, receiving)
                    buckets = ends.enter_context(closing(handed))
                if delivery is not None:
                    # a copy that has the version already was taken before the engines were lost
                    if copy is not None and copy.version != version:
                        take = _compared if self._config.transport == "delta" else _taken
                        buckets = take(buckets, copy, version)
                    delivery.send(buckets)
                elif receiving:
                    for _ in buckets:
                        pass
        finally:
            exhaust(weights, None)

    def _repair(self, delivery: Delivery | None) -> None:
        """Have the broken engines load the folder. Collective."""
        started = time.monotonic()
        path = self._folders.complete()
        on_every_rank(self._ranks, lambda: delivery.repair(path) if delivery else None)
        gives_up = False
        if delivery is not None and delivery.is_broken_everywhere:
            self._has_worked |= delivery.sent > 0
            self._failures += 1
            error = next(iter(delivery.broken.values()))
            is_definite = not self._has_worked and not isinstance(error, EngineUnavailable)
            gives_up = is_definite or self._failures >= _MOST_FAILURES
            if gives_up:
                _say_given_up(self._config.transport, error, path, time.monotonic() - started)
        self.folder_first = self._ranks.broadcast(gives_up)
        if self.folder_first:
            self.close()
            self._folders.release_copy()

    def _receiving(self) -> frozenset[int]:
        """The ranks whose GPU's memory engines read. Collective."""
        if self._config.transport != "ipc" or self._ranks.device.type != "cuda":
            return frozenset()
        sender = self._sender
        return self._ranks.broadcast(sender.receiving if isinstance(sender, ipc.IpcSender) else frozenset())

    def _give_back(self) -> None:
        """Give back the references of handles that no engine has opened. Collective."""
        if self._config.transport == "ipc":
            sender = self._sender
            opened = sender.opened if isinstance(sender, ipc.IpcSender) else set()
            self._handles.give_back(self._ranks.broadcast(opened))

    def _buffers(self, shapes: Mapping[str, Shape], bucket_bytes: int) -> list[Tensor]:
        """Make this rank's buffers; none on a rank whose buckets nobody reads."""
        by_ipc, device = self._config.transport == "ipc", self._ranks.device
        if not (self._ranks.is_first or (by_ipc and device.type == "cuda")):
            return []
        return make_buffers(
            shapes,
            dtype=self._policy.saved_dtype,
            bucket_bytes=bucket_bytes,
            device=device,
            make=ipc.shared_buffer if by_ipc else plain_buffer,
        )

    def _bucket_bytes(self) -> int:
        if self._config.bucket_mb:
            return self._config.bucket_mb * MB
        device = self._ranks.device
        if device.type != "cuda":
            return CPU_BUCKET_MB * MB
        free, _ = torch.cuda.mem_get_info(device)
        return min(GPU_BUCKET_MB * MB, max(LEAST_BUCKET_MB * MB, free // 8))


def _taken(buckets: Iterator[Packed], copy: HostCopy, version: int) -> Iterator[Packed]:
    """The buckets, each taken by the copy once the consumer, which sends it meanwhile, asks for the next."""
    copy.begin(version)
    for bucket in buckets:
        yield bucket
        copy.take(bucket, compare=copy.before == version - 1)


def _compared(buckets: Iterator[Packed], copy: HostCopy, version: int) -> Iterator[Packed]:
    """The buckets with their differences from the version before; the copy takes each before it is sent."""
    copy.begin(version)
    is_next = copy.before == version - 1
    for bucket in buckets:
        changes = copy.take(bucket, compare=is_next, changes=is_next)
        yield replace(bucket, changes=changes)


def _say_given_up(transport: str, error: EngineError, path: Path, seconds: float) -> None:
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    logger.error(
        "TRANSPORT DOES NOT WORK: trainer.publish.transport: %s reached no engine: %s. Until the trainer is "
        "started again, every version is written to a folder in %s first, and every engine reads it from "
        "there: %.2f GB a version, %.1f s for this one. Mend what the error names, or set transport: disk",
        transport, error, path.parent, nbytes / 1e9, seconds,
    )  # fmt: skip


def _sender(
    config: PublishConfig,
    ranks: Ranks,
    handles: ipc.Handles,
    engines: Sequence[Engine],
    engine_gpus: Sequence[Sequence[int]],
) -> Sender:
    if config.transport == "tensor":
        return TensorSender()
    if config.transport == "ipc":
        return ipc.IpcSender(ranks, handles, engines=engines, gpus=engine_gpus)
    if config.transport == "delta":
        return DeltaSender()
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    if backend == "nccl" and ranks.device.type != "cuda":
        raise TrainingError("trainer.publish.backend: nccl needs a trainer on GPUs; use gloo")
    return BroadcastSender(backend, address=config.address, timeout_s=config.timeout_s)
