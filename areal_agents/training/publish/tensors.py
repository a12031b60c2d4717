"""Sends weights in HTTP requests: no shared disk and no process group, but a third more bytes (base64)."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Mapping, Sequence

from areal_agents.errors import EngineError
from areal_agents.inference.engine import Engine
from areal_agents.training.publish.buckets import Packed


class TensorSender:
    """Sends buckets to each engine by itself; implements `piecewise.Sender`."""

    async def open(self, engines: Mapping[Engine, int]) -> None:
        """Nothing to prepare. `engines` gives the tensor-parallel workers of each."""
        self._workers = dict(engines)

    async def send(
        self, engines: Sequence[Engine], bucket: Packed, version: int
    ) -> dict[Engine, EngineError]:
        """Send one bucket; what failed, by engine."""
        payload = await asyncio.to_thread(_payload, bucket)
        results = await asyncio.gather(
            *(
                engine.update_weights_from_tensors(
                    [payload] * self._workers[engine], version, last=bucket.last
                )
                for engine in engines
            ),
            return_exceptions=True,
        )
        failures = {}
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, EngineError):
                failures[engine] = result
            elif isinstance(result, BaseException):
                raise result
        return failures

    async def aclose(self) -> None:
        """Nothing is held."""


def _payload(bucket: Packed) -> str:
    """The form that engines take: a pickled list of (name, tensor), base64."""
    return base64.b64encode(pickle.dumps(bucket.tensors(), pickle.HIGHEST_PROTOCOL)).decode()
