"""Sends only the weights that changed, where they are few; an engine that lacks the version before gets all.

The engine says which version it serves, and applies changes to that version only.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Mapping, Sequence

from torch import Tensor

from areal_agents.errors import EngineError
from areal_agents.inference.engine import Engine, ModelInfo, TensorForm
from areal_agents.training.publish.buckets import Packed
from areal_agents.training.publish.tensors import failures_of, payload_of


class DeltaSender:
    """Sends changes in HTTP requests; implements `piecewise.Sender`."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._infos: dict[Engine, ModelInfo] = {}
        self._sent: dict[Engine, int] = {}

    async def open(self, engines: Mapping[Engine, ModelInfo], version: int) -> None:
        """Note which versions the engines serve.

        Raises:
            EngineError: an engine does not take changes.
        """
        for engine, info in engines.items():
            if not info.stages_weights:
                raise EngineError(
                    f"{engine.base_url} does not take changes of weights, only the embedded engine does; use "
                    "another trainer.publish.transport"
                )
        self._infos, self._sent, self.sent_bytes = dict(engines), dict.fromkeys(engines, 0), 0

    async def send(
        self, engines: Sequence[Engine], bucket: Packed, version: int
    ) -> dict[Engine, EngineError]:
        """Send the changes of one bucket, or the bucket; return the failures by engine."""
        results = await asyncio.gather(
            *(self._send(engine, bucket, version) for engine in engines), return_exceptions=True
        )
        self.sent_bytes = max(self._sent.values())
        return failures_of(engines, results)

    async def aclose(self) -> None:
        """There is nothing to release."""

    async def _send(self, engine: Engine, bucket: Packed, version: int) -> None:
        before = version - 1
        if bucket.changes is None or self._infos[engine].version != before:
            form: TensorForm = "named"
            payload = await asyncio.to_thread(payload_of, bucket)
            self._sent[engine] += bucket.header.nbytes
        else:
            changes, whole = split(bucket)
            payload = await asyncio.to_thread(_payload, before, changes, whole)
            form = "delta"
            self._sent[engine] += sum(indices.nbytes + values.nbytes for _, indices, values in changes)
            self._sent[engine] += sum(tensor.nbytes for _, tensor in whole)
        await engine.update_weights_from_tensors([payload], version, last=bucket.last, form=form)


def split(bucket: Packed) -> tuple[list[tuple[str, Tensor, Tensor]], list[tuple[str, Tensor]]]:
    """The weights of a bucket that are smaller as (name, indices, values), and those that are not, whole."""
    assert bucket.changes is not None
    sparse, whole = [], []
    for change, (name, tensor) in zip(bucket.changes, bucket.tensors(), strict=True):
        if change.nbytes < tensor.nbytes:
            sparse.append((name, change.indices, change.values))
        else:
            whole.append((name, tensor.to("cpu", copy=True)))
    return sparse, whole


def _payload(before: int, changes: list[tuple[str, Tensor, Tensor]], whole: list[tuple[str, Tensor]]) -> str:
    found = {"before": str(before), "changes": changes, "whole": whole}
    return base64.b64encode(pickle.dumps(found, pickle.HIGHEST_PROTOCOL)).decode()
