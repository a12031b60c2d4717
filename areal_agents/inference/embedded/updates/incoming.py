"""Weights that arrive in pieces, by requests or broadcasts. Either all of them are used, or none.

Invariant: what IncomingWeights holds are weights of the model in their shapes, each at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from areal_agents.errors import RequestError
from areal_agents.inference.embedded.model.architecture import Architecture
from areal_agents.inference.embedded.model.weights import (
    Weights,
    assemble,
    changed_weights,
    expected_shapes,
    is_derived,
)
from areal_agents.inference.embedded.updates.payloads import Piece
from areal_agents.inference.engine import WeightBucket

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class IncomingWeights:
    """One weight update, from its beginning to its end.

    `version` and `flush_cache` are those of the piece with a version, which is the last one; `is_used` tells
    whether any piece was announced, even if it did not arrive, and `has_failed` whether one did not. `before`
    is the version that the pieces change; None if they replace every weight.
    """

    def __init__(self, arch: Architecture) -> None:
        self.version: str | None = None
        self.before: str | None = None
        self.flush_cache = True
        self.is_used = False
        self.has_failed = False
        self._finished = False
        self._arch = arch
        self._shapes = expected_shapes(arch)
        self._tensors: dict[str, Tensor] = {}
        self._changes: dict[str, tuple[Tensor, Tensor]] = {}  # indices and values

    def check(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Raise RequestError if one of these is not a weight of the model, has another shape, or was sent
        before."""
        seen = {*self._tensors, *self._changes}
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

    def add(self, piece: Piece) -> None:
        """Add a piece, completely or not at all; RequestError as for `check`, or for an unsupported dtype."""
        if piece.before is not None and self.before not in (None, piece.before):
            raise RequestError(f"the update applies to version {self.before}, and a piece to {piece.before}")
        names = [name for name, _ in piece.whole] + [name for name, _, _ in piece.changes]
        shapes = [tensor.shape for _, tensor in piece.whole]
        shapes += [torch.Size(self._shapes.get(name, ())) for name, _, _ in piece.changes]
        self.check(names, shapes)
        values = [*piece.whole, *((name, values) for name, _, values in piece.changes)]
        for name, tensor in values:
            if tensor.dtype not in DTYPES.values():
                raise RequestError(f"{name} has dtype {tensor.dtype}, expected one of {sorted(DTYPES)}")
        for name, indices, _ in piece.changes:
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < prod(self._shapes[name]):
                raise RequestError(f"{name} has changes outside of its {prod(self._shapes[name])} values")
        self.before = piece.before or self.before
        for name, tensor in piece.whole:
            if not is_derived(name, self._arch):
                self._tensors[name] = _widened(tensor.detach(), copy=piece.is_shared)
        for name, indices, changed in piece.changes:
            if not is_derived(name, self._arch):
                self._changes[name] = indices.long(), _widened(changed, copy=False)

    def note(self, version: str | None, *, flush_cache: bool) -> None:
        """Record the version and flags that a piece sets for the whole update."""
        if version is not None or self.version is None:
            self.version, self.flush_cache = version, flush_cache

    def finish(self, served: Weights | None) -> Weights:
        """Return the model's weights, once; RequestError if some are missing, or at the second call.

        Args:
            served: the weights of the version `before`, placed, to which changes apply; None without it.
        """
        if self._finished:
            raise RequestError("the update's weights were used before; begin another one")
        if self.before is not None and (self.has_failed or self.version is None):
            # whatever is missing would silently keep its value of the version before
            raise RequestError("a piece of the changes did not arrive; the old weights are kept")
        if self.before is None and (missing := sorted(self._shapes.keys() - self._tensors.keys())):
            raise RequestError(
                f"the update lacks {len(missing)} of the model's {len(self._shapes)} weights, the first is "
                f"{missing[0]}; the old weights are kept"
            )
        self._finished = True
        tensors, self._tensors = self._tensors, {}
        if served is None:
            return assemble(tensors, self._arch)
        changes, self._changes = self._changes, {}
        return changed_weights(served, tensors, changes, self._arch)


def split_bucket(flat: Tensor, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
    """Split `flat` [bucket.nbytes], uint8, into its tensors; see WeightBucket."""
    named, start = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        stop = start + torch.Size(shape).numel() * DTYPES[dtype].itemsize
        named.append((name, flat[start:stop].view(DTYPES[dtype]).reshape(shape)))
        start = stop
    return named


def _widened(tensor: Tensor, *, copy: bool) -> Tensor:
    """The tensor as float32, the same bits for each value wherever it is in the tensor."""
    wide = tensor.to(torch.float32, copy=copy)
    if tensor.dtype == torch.float16:
        # torch keeps the payload of a NaN where it converts several numbers at once, and otherwise does not
        wide[torch.isnan(wide)] = torch.nan
    return wide
