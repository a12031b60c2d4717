"""Sends weights in HTTP requests: needs no shared disk and no process group, but base64 adds a third more
bytes."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Mapping, Sequence

from areal_agents.errors import EngineError
from areal_agents.inference.engine import Engine, ModelInfo
from areal_agents.training.publish.buckets import Packed


class TensorSender:
    """Sends buckets to each engine separately; implements `piecewise.Sender`."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._workers: dict[Engine, int] = {}

    async def open(self, engines: Mapping[Engine, ModelInfo], version: int) -> None:
        """Note the number of tensor-parallel workers of each engine; nothing else needs preparing."""
        self.sent_bytes = 0
        self._workers = {engine: info.workers for engine, info in engines.items()}

    async def send(
        self, engines: Sequence[Engine], bucket: Packed, version: int
    ) -> dict[Engine, EngineError]:
        """Send one bucket; return the failures by engine."""
        payload = await asyncio.to_thread(payload_of, bucket)
        results = await asyncio.gather(
            *(
                engine.update_weights_from_tensors(
                    [payload] * self._workers[engine], version, last=bucket.last
                )
                for engine in engines
            ),
            return_exceptions=True,
        )
        self.sent_bytes += bucket.header.nbytes
        return failures_of(engines, results)

    async def aclose(self) -> None:
        """There is nothing to release."""


def failures_of(
    engines: Sequence[Engine], results: Sequence[BaseException | None]
) -> dict[Engine, EngineError]:
    """Return the engines whose call failed. An exception that is no EngineError is raised."""
    failures = {}
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, EngineError):
            failures[engine] = result
        elif result is not None:
            raise result
    return failures


def payload_of(bucket: Packed) -> str:
    """Encode the bucket as engines expect it: a pickled list of (name, tensor) in base64."""
    # copied, because pickling a view would write the whole buffer
    named = [(name, tensor.to("cpu", copy=True)) for name, tensor in bucket.tensors()]
    return base64.b64encode(pickle.dumps(named, pickle.HIGHEST_PROTOCOL)).decode()
