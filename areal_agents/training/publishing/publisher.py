"""One function behind which every transport sits, on every rank: folder, row, swap, comparison."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from areal_agents.errors import EngineError, EngineUnavailable, TrainingError
from areal_agents.inference.engine import Engine, MemoryKind, ModelInfo
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks
from areal_agents.training.gathering import Shape, published_shapes, whole_weights
from areal_agents.training.model import Policy
from areal_agents.training.model_folder import remove_unfinished
from areal_agents.training.publishing import adapters, disk
from areal_agents.training.publishing.broadcast import BroadcastSender
from areal_agents.training.publishing.buckets import MB
from areal_agents.training.publishing.checksums import Comparison
from areal_agents.training.publishing.config import PublishConfig
from areal_agents.training.publishing.fleet import Fleet, Loop
from areal_agents.training.publishing.folders import (
    Written,
    exhaust,
    forget_before,
    version_folders,
    versions_folder,
    write_policy,
    write_policy_adapter,
)
from areal_agents.training.publishing.piecewise import Delivery, Sender
from areal_agents.training.publishing.sleep import fall_asleep, wake
from areal_agents.training.publishing.tensors import TensorSender

T = TypeVar("T")

log = logging.getLogger(__name__)

_LOOK_S = 0.5

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclass(frozen=True, slots=True)
class Published:
    """A version that engines now serve.

    Attributes:
        path: its folder.
        publish_s: everything, in seconds; assemble_s: of it, gathering and writing the folder, while engines
            sample; pause_s: the longest that an engine did not.
        nbytes: of the weights in the folder.
        density: the share of them that changed since the version before; None where there is none.
        agreement: of the weights that engines hold, the share that was compared and found to be those
            published; None where nothing was compared.
        left_out: engines that did not take it; repaired: those that took the folder after another transport
            had failed.
        busy_s: seconds that the engines have sampled since their start, mean; None where one does not count.
    """

    version: int
    path: Path
    publish_s: float
    assemble_s: float
    pause_s: float
    nbytes: int
    density: float | None
    agreement: float | None
    left_out: int
    repaired: int
    busy_s: float | None


class Publisher:
    """Publishes the versions of one run; every rank has one, and only the first one's talks to others.

    Args:
        store, engines: of the first rank; the others have no store and no engines.
        run_dir: of the run; model_path: the folder that it began with.
        keep: how many folders of versions are kept.
    """

    def __init__(
        self,
        config: PublishConfig,
        policy: Policy,
        ranks: Ranks,
        *,
        store: Store | None,
        engines: Sequence[Engine],
        run_dir: Path,
        model_path: Path,
        keep: int,
    ) -> None:
        if (store is None) == ranks.is_first or bool(engines) != ranks.is_first:
            raise ValueError("the first rank, and no other, publishes: it needs a store and an engine")
        self._config, self._policy, self._ranks = config, policy, ranks
        self._store, self._engines = store, tuple(engines)
        self._model_path, self._keep = model_path, keep
        self._weights = versions_folder(config.folder, run_dir)
        self._verified = False
        self._sender = _sender(config, ranks) if engines else None
        self._loop = Loop() if engines else None
        if engines:
            remove_unfinished(self._weights, "v*")

    def publish(self, *, version: int, step: int) -> Published | None:
        """Write, record and swap in a version; None on all ranks but the first. Collective.

        Raises:
            EngineError: no engine took it, or one holds other weights than were published, and is left
                paused. The version stays recorded; a resumed run publishes the weights again under a later
                one.
            TrainingError: the folder cannot be written; nothing is recorded, the old version stays served.
        """
        started = time.monotonic()
        path = self._weights / f"v{version}"
        written = self._together(lambda: self._write(path, version))
        assemble_s = time.monotonic() - started
        fleet = Fleet(self._engines, version)
        checks = self._together(lambda: Comparison(self._base(path)) if self._verifies else None)
        pause_s, repaired = self._deliver(fleet, path, step, checks)
        self._verified = self._verified or checks is not None
        if self._loop is None or written is None:
            return None
        return Published(
            version=version,
            path=path,
            assemble_s=assemble_s,
            pause_s=pause_s,
            nbytes=written.nbytes,
            density=written.density,
            agreement=checks.share if checks is not None else None,
            left_out=len(fleet.left_out),
            repaired=repaired,
            busy_s=self._loop.run(self._rest(fleet, version)),
            publish_s=time.monotonic() - started,
        )

    def verify(self, version: int) -> float | None:
        """Compare what every engine holds with a published version that is still kept, on demand; the share
        of it that could be compared. On the first rank alone.

        Raises:
            EngineError: an engine holds other weights, or does not answer.
        """
        assert self._loop is not None, "only the first rank talks to engines"
        checks = Comparison(self._base(self._weights / f"v{version}"))
        fleet = Fleet(self._engines, version)
        self._loop.run(fleet.each(checks))
        return checks.share

    @contextmanager
    def engines_asleep(self, kinds: Sequence[MemoryKind]) -> Iterator[None]:
        """For the length of a with-block, have the memory of `kinds` of every engine free. Collective.

        EngineError if an engine refuses; what it held generating goes on after the block in any case.
        """
        if not kinds:
            yield
            return
        try:
            self._together(lambda: self._sleep_or_wake(fall_asleep, kinds))
            yield
        except BaseException:
            self._sleep_or_wake(wake, kinds)
            raise
        self._together(lambda: self._sleep_or_wake(wake, kinds))

    def _sleep_or_wake(
        self,
        change: Callable[[Sequence[Engine], Sequence[MemoryKind]], Coroutine[Any, Any, None]],
        kinds: Sequence[MemoryKind],
    ) -> None:
        if self._loop is not None:
            self._loop.run(change(self._engines, kinds))

    def close(self) -> None:
        """Leave the process group, if there is one, and end the event loop."""
        if self._loop is None:
            return
        if self._sender is not None:
            self._loop.run(self._sender.aclose())
        self._loop.run(_close(self._engines))
        self._loop.close()

    @property
    def _verifies(self) -> bool:
        first = self._config.verify == "first" and not self._verified
        return bool(self._engines) and (first or self._config.verify == "every")

    def _base(self, path: Path) -> Path:
        """The folder of the weights that an engine's checksum is of; adapters are not in it."""
        return self._model_path if self._config.transport == "lora" else path

    def _write(self, path: Path, version: int) -> Written | None:
        folders = version_folders(self._weights) if self._ranks.is_first else {}
        before = [v for v in folders if v < version]  # later ones are of a run that was here earlier
        previous = folders[before[-1]] if before else None
        if self._config.transport == "lora":
            return write_policy_adapter(
                self._policy, path, base=self._model_path, writes=self._ranks.is_first, before=previous
            )
        return write_policy(
            self._policy, path, like=self._model_path, writes=self._ranks.is_first, before=previous
        )

    def _deliver(self, fleet: Fleet, path: Path, step: int, checks: Comparison | None) -> tuple[float, int]:
        """Record the version and have it served: the pause in seconds, and how many engines were repaired."""
        workers = self._together(lambda: self._record(fleet, path, step))
        try:
            if self._config.transport in ("tensor", "broadcast"):
                served = self._send(fleet, path, workers or {}, checks)
            else:
                served = self._together(lambda: self._swap(fleet, path, checks)) or 0.0, 0
        except EngineError:
            _raise_failure(checks)  # it says more than that another engine was lost beside
            raise
        self._together(lambda: _raise_failure(checks))
        return served

    def _record(self, fleet: Fleet, path: Path, step: int) -> dict[Engine, int] | None:
        """Make it the current version; the workers of each engine that is there and serves the model."""
        if self._loop is None or self._store is None:
            return None
        self._store.publish_version(fleet.version, step=step, path=str(path))
        infos = self._loop.run(self._meet_all(fleet))
        return dict(zip(fleet.engines, infos, strict=True))

    async def _meet_all(self, fleet: Fleet) -> list[int]:
        """`_meet` each engine. If none is there, wait: whoever started them starts them again."""
        deadline = time.monotonic() + self._config.engine_wait_s
        waiting = False
        while True:
            try:
                return await fleet.each(self._meet)
            except EngineUnavailable as error:
                if time.monotonic() > deadline:
                    raise
                if not waiting:
                    log.warning("version %d waits for an engine: %s", fleet.version, error)
                waiting = True
            await asyncio.sleep(_LOOK_S)

    async def _meet(self, engine: Engine) -> int:
        info = await engine.model_info()
        fault = _other_model(info, self._policy)
        if fault:
            raise EngineError(f"{engine.base_url} serves another model than is trained: {fault}")
        return info.workers

    def _swap(self, fleet: Fleet, path: Path, checks: Comparison | None) -> float | None:
        """By the folder alone, which the first rank does for all."""
        if self._loop is None:
            return None
        deliver = adapters.deliver if self._config.transport == "lora" else disk.deliver
        try:
            return self._loop.run(deliver(fleet, path, pause=self._config.pause, check=checks))
        except EngineUnavailable as error:
            log.warning("version %d is delivered once more, for engines were lost: %s", fleet.version, error)
        self._loop.run(self._meet_all(fleet))
        return self._loop.run(deliver(fleet, path, pause=self._config.pause, check=checks))

    def _send(
        self, fleet: Fleet, path: Path, workers: dict[Engine, int], checks: Comparison | None
    ) -> tuple[float, int]:
        """In buckets, for which all ranks gather the weights once more, while the engines are paused."""
        delivery: Delivery | None = None
        pause = self._config.pause
        weights = whole_weights(self._policy.model, self._policy.lora)
        shapes = published_shapes(self._policy.model)  # worked out before the pause, which it would lengthen
        if self._loop is not None and self._sender is not None:
            assert pause != "drain", "refused by the config"
            delivery = Delivery(self._loop, fleet, self._sender, path=path, pause=pause, check=checks)
        self._together(lambda: delivery.begin(workers) if delivery else None)
        self._together(lambda: self._gather(weights, shapes, delivery))
        return self._together(lambda: delivery.end() if delivery else 0.0), len(
            delivery.repaired if delivery else ()
        )

    def _gather(
        self, weights: Iterator[tuple[str, Tensor]], shapes: Mapping[str, Shape], delivery: Delivery | None
    ) -> None:
        try:
            if delivery is not None:
                delivery.send(
                    weights,
                    shapes,
                    dtype=self._policy.saved_dtype,
                    bucket_bytes=self._config.bucket_mb * MB,
                )
        finally:
            exhaust(weights, None)

    async def _rest(self, fleet: Fleet, version: int) -> float | None:
        """Forget old versions; the engines' seconds of sampling."""
        forgotten = await asyncio.to_thread(forget_before, self._weights, version, keep=self._keep)
        if self._config.transport == "lora" and forgotten:
            await adapters.forget(fleet, forgotten)
        try:
            busy = await fleet.each(lambda engine: engine.busy_s())
        except EngineError as error:  # the version is served: an engine that is lost now is for the next one
            log.warning("after version %d no engine answers: %s", version, error)
            busy = []
        # A connection that is kept until the next version would not notice that the server has closed it.
        await _close(self._engines)
        known = [seconds for seconds in busy if seconds is not None]
        return sum(known) / len(known) if len(known) == len(self._engines) else None

    def _together(self, call: Callable[[], T]) -> T:
        """Do it on every rank; if one fails, all do, so that none waits for another for ever."""
        try:
            result = call()
        except Exception:
            self._ranks.any(True)
            raise
        if self._ranks.any(False):
            raise TrainingError("the first rank could not publish a version; its log says why")
        return result


def _raise_failure(checks: Comparison | None) -> None:
    if checks is not None and checks.failure is not None:
        raise checks.failure


def _sender(config: PublishConfig, ranks: Ranks) -> Sender | None:
    if config.transport == "tensor":
        return TensorSender()
    if config.transport != "broadcast":
        return None
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    if backend == "nccl" and ranks.device.type != "cuda":
        raise TrainingError("trainer.publish.backend: nccl needs a trainer on GPUs; use gloo")
    return BroadcastSender(backend, address=config.address, timeout_s=config.timeout_s)


def _other_model(info: ModelInfo, policy: Policy) -> str | None:
    """What shows that an engine serves another model; None if nothing does. A real server would end itself
    over weights of other shapes."""
    trained = policy.model.config.get_text_config()
    if info.vocab_size != trained.vocab_size:
        return f"a vocabulary of {info.vocab_size}, not {trained.vocab_size}"
    try:
        served = json.loads((Path(info.model_path) / "config.json").read_text())
    except (OSError, ValueError):  # on another machine
        return None
    served = served.get("text_config") or served
    for name in _SIZES:
        have, want = served.get(name), getattr(trained, name, None)
        if have is not None and want is not None and have != want:
            return f"{name} {have}, not {want}"
    return None


async def _close(engines: Sequence[Engine]) -> None:
    for engine in engines:
        await engine.aclose()
