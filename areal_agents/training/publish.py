"""A policy version leaves the trainer: a safetensors folder, a row in the store, a swap in the engine.

The folder is complete before it has its name, the row is written before the engine pauses, and the
engine pauses for nothing but the swap.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from areal_agents.errors import EngineError
from areal_agents.inference.engine import Engine
from areal_agents.store import Store
from areal_agents.training.model_folder import remove_unfinished, write_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """A version that the engine now serves.

    Attributes:
        path: its folder.
        publish_s: everything, in seconds; pause_s: how much of it the engine did not generate.
        busy_s: seconds that the engine has sampled since its start; None where it does not count them.
    """

    version: int
    path: Path
    publish_s: float
    pause_s: float
    busy_s: float | None


class Publisher:
    """Publishes versions of one run. It owns the event loop that the engine client lives on."""

    def __init__(self, *, store: Store, engine: Engine, run_dir: Path, model_path: Path, keep: int) -> None:
        self._store = store
        self._engine = engine
        self._weights = run_dir / "weights"
        self._model_path = model_path
        self._keep = keep
        self._runner = asyncio.Runner()
        remove_unfinished(self._weights, "v*")

    def publish(
        self, weights: Mapping[str, Tensor], *, version: int, step: int, dtype: torch.dtype
    ) -> Published:
        """Write, record and swap in a version.

        Raises:
            EngineError: the engine is lost or refuses the weights. The version stays recorded; a
                resumed run publishes the weights again under a later one.
        """
        started = time.monotonic()
        path = self._weights / f"v{version}"
        write_model(weights, path, like=self._model_path, dtype=dtype)
        self._store.publish_version(version, step=step, path=str(path))
        pause_s, busy_s = self._runner.run(self._swap(path, version))
        self._forget_before(version)
        return Published(version, path, time.monotonic() - started, pause_s, busy_s)

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()

    async def _swap(self, path: Path, version: int) -> tuple[float, float | None]:
        try:
            return await swap(self._engine, str(path), version), await self._engine.busy_s()
        finally:
            # The loop rests until the next version: a connection kept that long would not notice
            # that the server has closed it.
            await self._engine.aclose()

    def _forget_before(self, version: int) -> None:
        folders = {int(p.name[1:]): p for p in self._weights.glob("v*") if p.name[1:].isdigit()}
        for old in sorted(v for v in folders if v <= version)[: -self._keep]:
            shutil.rmtree(folders[old])


async def swap(engine: Engine, path: str, version: int) -> float:
    """Replace the served weights under a retract pause; seconds that the pause took.

    The engine goes on whatever fails; if it refuses the weights, then with the old ones.
    """
    started = time.monotonic()
    try:
        await engine.pause("retract")  # within: an engine whose answer was lost has paused all the same
        await engine.update_weights_from_disk(path, version)
    except BaseException:
        try:
            await engine.resume()
        except EngineError as error:  # the first error says more
            log.warning("the engine did not resume after a failed swap: %s", error)
        raise
    await engine.resume()
    return time.monotonic() - started
