"""Weight transports: engines read a version's folder, or receive buckets that all ranks gather."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor

from areal_agents.errors import EngineUnavailable, TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.gathering import Shape, published_shapes, whole_weights
from areal_agents.training.model.model import Policy
from areal_agents.training.publish import adapters, disk
from areal_agents.training.publish.broadcast import BroadcastSender
from areal_agents.training.publish.buckets import MB
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.publish.disk import Check
from areal_agents.training.publish.fleet import EventLoopThread, Fleet
from areal_agents.training.publish.piecewise import Delivery, Sender
from areal_agents.training.publish.preflight import Reachable
from areal_agents.training.publish.rank_failures import on_every_rank
from areal_agents.training.publish.tensors import TensorSender
from areal_agents.training.publish.version_folder import exhaust


@dataclass(frozen=True, slots=True)
class Delivered:
    """pause_s: the longest time that an engine did not sample, in seconds. repaired: engines that loaded the
    folder after another transport failed."""

    pause_s: float = 0.0
    repaired: int = 0


class Transport(Protocol):
    """Delivers versions to engines; implemented by `FolderTransport` and `BucketTransport`. Every rank has
    one."""

    def deliver(self, fleet: Fleet, path: Path, reachable: Reachable, check: Check | None) -> Delivered:
        """Make `fleet` serve the version in the folder `path`. Collective; only the first rank's arguments
        and result count.

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
    config: PublishConfig, policy: Policy, ranks: Ranks, loop: EventLoopThread | None
) -> Transport:
    """Create the transport that the config selects. `loop` calls engines; it is None on all ranks except the
    first.

    Raises:
        TrainingError: the transport cannot be used with the trainer's device.
    """
    if config.transport in ("disk", "lora"):
        return FolderTransport(config, ranks, loop)
    return BucketTransport(config, policy, ranks, loop)


class FolderTransport:
    """The first rank tells engines to load the folder; the other ranks wait for it."""

    def __init__(self, config: PublishConfig, ranks: Ranks, loop: EventLoopThread | None) -> None:
        self._config, self._ranks, self._loop = config, ranks, loop

    def deliver(self, fleet: Fleet, path: Path, reachable: Reachable, check: Check | None) -> Delivered:
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
    """All ranks gather the weights once more, while the engines are paused; the first rank sends them."""

    def __init__(
        self, config: PublishConfig, policy: Policy, ranks: Ranks, loop: EventLoopThread | None
    ) -> None:
        self._config, self._policy, self._ranks, self._loop = config, policy, ranks, loop
        self._sender = _sender(config, ranks) if loop is not None else None

    def deliver(self, fleet: Fleet, path: Path, reachable: Reachable, check: Check | None) -> Delivered:
        """See Transport.deliver."""
        try:
            return self._send(fleet, path, reachable, check)
        except EngineUnavailable:
            self.close()  # an engine that comes back is not in the process group
            raise

    def close(self) -> None:
        """See Transport.close."""
        if self._loop is not None and self._sender is not None:
            self._loop.run(self._sender.aclose())

    def _send(self, fleet: Fleet, path: Path, reachable: Reachable, check: Check | None) -> Delivered:
        weights = whole_weights(self._policy.model, self._policy.lora)
        # computed before the pause, which it would otherwise lengthen
        shapes = published_shapes(self._policy.model)
        delivery: Delivery | None = None
        if self._loop is not None and self._sender is not None:
            pause = self._config.pause
            assert pause != "drain", "PublishConfig refuses drain with bucket transports"
            delivery = Delivery(self._loop, fleet, self._sender, path=path, pause=pause, check=check)
        on_every_rank(self._ranks, lambda: delivery.begin(reachable.workers) if delivery else None)
        on_every_rank(self._ranks, lambda: self._gather(weights, shapes, delivery))
        pause_s = on_every_rank(self._ranks, lambda: delivery.end() if delivery else 0.0)
        return Delivered(pause_s, len(delivery.repaired) if delivery else 0)

    def _gather(
        self, weights: Iterator[tuple[str, Tensor]], shapes: Mapping[str, Shape], delivery: Delivery | None
    ) -> None:
        try:
            if delivery is not None:
                dtype, bucket_bytes = self._policy.saved_dtype, self._config.bucket_mb * MB
                delivery.send(weights, shapes, dtype=dtype, bucket_bytes=bucket_bytes)
        finally:
            exhaust(weights, None)


def _sender(config: PublishConfig, ranks: Ranks) -> Sender:
    if config.transport == "tensor":
        return TensorSender()
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    if backend == "nccl" and ranks.device.type != "cuda":
        raise TrainingError("trainer.publish.backend: nccl needs a trainer on GPUs; use gloo")
    return BroadcastSender(backend, address=config.address, timeout_s=config.timeout_s)
