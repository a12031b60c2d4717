"""Weights that arrive in pieces, by requests or broadcasts. Either all of them are used, or none.

Invariant: what IncomingWeights holds are weights of the model in their shapes, each at most once.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from areal_agents.errors import RequestError
from areal_agents.inference.embedded.model.architecture import Architecture
from areal_agents.inference.embedded.model.weights import Weights, assemble, expected_shapes, is_derived
from areal_agents.inference.engine import WeightBucket

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class IncomingWeights:
    """One weight update, from its beginning to its end.

    `version` and `flush_cache` are those of the piece with a version; `is_used` tells whether any piece was
    announced, even if it did not arrive.
    """

    def __init__(self, arch: Architecture) -> None:
        self.version: str | None = None
        self.flush_cache = True
        self.is_used = False
        self._arch = arch
        self._shapes = expected_shapes(arch)
        self._tensors: dict[str, Tensor] = {}

    def check(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Raise RequestError if one of these is not a weight of the model, has another shape, or was sent
        before."""
        seen = set(self._tensors)
        for name, shape in zip(names, shapes, strict=True):
            if is_derived(name, self._arch):
                continue
            if name not in self._shapes:
                raise RequestError(f"{name} is not a weight of this {self._arch.model_type} model")
            if tuple(shape) != self._shapes[name]:
                raise RequestError(f"{name} has shape {list(shape)}, expected {list(self._shapes[name])}")
            if name in seen:
                raise RequestError(f"{name} was sent twice in one update")
            seen.add(name)

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Add a piece, completely or not at all; RequestError as for `check`, or for an unsupported dtype."""
        self.check([name for name, _ in named], [tensor.shape for _, tensor in named])
        for name, tensor in named:
            if tensor.dtype not in DTYPES.values():
                raise RequestError(f"{name} has dtype {tensor.dtype}, expected one of {sorted(DTYPES)}")
        self._tensors |= {
            name: tensor.detach().float() for name, tensor in named if not is_derived(name, self._arch)
        }

    def note(self, version: str | None, *, flush_cache: bool) -> None:
        """Record the version and flags that a piece sets for the whole update."""
        if version is not None or self.version is None:
            self.version, self.flush_cache = version, flush_cache

    def finish(self) -> Weights:
        """Return the model's weights, once; RequestError if some are missing."""
        if missing := sorted(self._shapes.keys() - self._tensors.keys()):
            raise RequestError(
                f"the update lacks {len(missing)} of the model's {len(self._shapes)} weights, the first is "
                f"{missing[0]}; the old weights are kept"
            )
        tensors, self._tensors = self._tensors, {}
        return assemble(tensors, self._arch)


def read_payload(payload: object) -> list[tuple[str, Tensor]]:
    """Parse the base64 form of a pickled list of (name, tensor). Nothing but tensors is unpickled;
    RequestError for anything else."""
    try:
        raw = base64.b64decode(payload, validate=True)  # type: ignore[arg-type]
        named = _TensorUnpickler(io.BytesIO(raw)).load()
    except Exception as error:  # unpickling invalid bytes can raise any exception
        raise RequestError(f"serialized_named_tensors is not a base64 pickle of tensors: {error}") from error
    if not isinstance(named, list) or not all(_is_named(item) for item in named):
        raise RequestError("serialized_named_tensors must hold a list of (name, tensor)")
    return named


def split_bucket(flat: Tensor, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
    """Split `flat` [bucket.nbytes], uint8, into its tensors; see WeightBucket."""
    named, start = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        stop = start + torch.Size(shape).numel() * DTYPES[dtype].itemsize
        named.append((name, flat[start:stop].view(DTYPES[dtype]).reshape(shape)))
        start = stop
    return named


def _is_named(item: object) -> bool:
    return (
        isinstance(item, tuple | list)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], Tensor)
    )


def _load_storage(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw), weights_only=True)


class _TensorUnpickler(pickle.Unpickler):
    """Allows only the names in pickled CPU tensors, none of which can run code."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
            ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
            ("torch.storage", "_load_from_bytes"): _load_storage,
        }
        try:
            return known[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a pickle of tensors") from None
