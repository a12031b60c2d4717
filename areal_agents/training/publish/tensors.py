"""Sends weights in HTTP requests: needs no shared disk and no process group, but base64 adds a third more
bytes."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Mapping, Sequence

from areal_agents.errors import EngineError
from areal_agents.inference.engine import Engine
from areal_agents.training.publish.buckets import Packed


class TensorSender:
    """Sends buckets to each engine separately; implements `piecewise.Sender`."""

    async def open(self, engines: Mapping[Engine, int]) -> None:
        """Store `engines`, with the number of tensor-parallel workers of each; nothing else needs
        preparing."""
        self._workers = dict(engines)

    async def send(
        self, engines: Sequence[Engine], bucket: Packed, version: int
    ) -> dict[Engine, EngineError]:
        """Send one bucket; return the failures by engine."""
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
        """There is nothing to release."""


def _payload(bucket: Packed) -> str:
    """Encode the bucket as engines expect it: a pickled list of (name, tensor) in base64."""
    return base64.b64encode(pickle.dumps(bucket.tensors(), pickle.HIGHEST_PROTOCOL)).decode()
