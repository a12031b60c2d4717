"""Reads the weights in a request: pickled tensors, handles of shared memory, and changes of served weights.

Nothing is unpickled that could run code.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from areal_agents.errors import RequestError

Named = list[tuple[str, Tensor]]
_DEVICE = 6  # the position of the device among the arguments of torch's rebuild_cuda_tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the weights of an update.

    Attributes:
        whole: weights by name. changes: (name, indices [n], values [n]) of flat weights that are served now.
        before: the version that the changes apply to; None without changes, and then every weight must come.
        is_shared: whether the sender overwrites the memory of `whole` after the answer.
    """

    whole: Named
    changes: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    before: str | None = None
    is_shared: bool = False


def read_payload(payload: object, form: object = None) -> Piece:
    """Parse one of serialized_named_tensors, see `Engine.update_weights_from_tensors`. RequestError for
    anything else."""
    if form is None:
        return Piece(_named(_unpickled(payload, _TensorUnpickler), "serialized_named_tensors"))
    if form == "flattened_bucket":
        return _bucket(_unpickled(payload, _HandleUnpickler))
    if form == "delta":
        return _delta(_unpickled(payload, _TensorUnpickler))
    raise RequestError(f"load_format {form!r} is not supported; use flattened_bucket, delta, or leave it out")


def _unpickled(payload: object, unpickler: type[pickle.Unpickler]) -> Any:
    try:
        raw = base64.b64decode(payload, validate=True)  # type: ignore[arg-type]
        return unpickler(io.BytesIO(raw)).load()
    except Exception as error:  # unpickling invalid bytes can raise any exception
        raise RequestError(f"serialized_named_tensors is not a base64 pickle of tensors: {error}") from error


def _named(found: object, what: str) -> Named:
    if not isinstance(found, list) or not all(_is_named(item) for item in found):
        raise RequestError(f"{what} must hold a list of (name, tensor)")
    return found


def _bucket(found: object) -> Piece:
    try:
        flat, metadata = found["flattened_tensor"], found["metadata"]  # type: ignore[index]
        whole = [
            (str(part.name), flat[part.start_idx : part.end_idx].view(part.dtype).view(part.shape))
            for part in metadata
        ]
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise RequestError(
            f"a flattened bucket must hold flattened_tensor and metadata that fit together: {error!r}"
        ) from error
    return Piece(whole, is_shared=True)


def _delta(found: object) -> Piece:
    if not isinstance(found, Mapping) or not isinstance(found.get("before"), str):
        raise RequestError("a delta must name the version that it applies to, as before")
    changes = found.get("changes")
    if not isinstance(changes, list) or not all(_is_change(change) for change in changes):
        raise RequestError("a delta must hold changes, a list of (name, indices, values) of equal lengths")
    return Piece(_named(found.get("whole"), "whole"), changes, found["before"])


def _is_named(item: object) -> bool:
    return (
        isinstance(item, tuple | list)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], Tensor)
    )


def _is_change(item: object) -> bool:
    if not isinstance(item, tuple | list) or len(item) != 3 or not isinstance(item[0], str):
        return False
    indices, values = item[1:]
    return (
        isinstance(indices, Tensor)
        and isinstance(values, Tensor)
        and indices.dtype in (torch.int32, torch.int64)
        and indices.ndim == 1
        and indices.shape == values.shape
    )


def _load_storage(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw), weights_only=True)


def _rebuild_on_device(*arguments: Any) -> Tensor:
    """Open a CUDA tensor whose device is given by its UUID, because numbers differ between processes."""
    wanted = arguments[_DEVICE]
    for device in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(device).uuid) == wanted:
            opened = (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])
            tensor: Tensor = reductions.rebuild_cuda_tensor(*opened)
            return tensor
    raise ValueError(f"the engine does not see the GPU {wanted} of the sender")


class _TensorUnpickler(pickle.Unpickler):
    """Allows only the names in pickled CPU tensors, none of which can run code."""

    known: Mapping[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
        ("torch.storage", "_load_from_bytes"): _load_storage,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.known[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a pickle of tensors") from None


class _HandleUnpickler(_TensorUnpickler):
    """Allows the names in pickled handles of shared memory as well."""

    known: Mapping[tuple[str, str], Any] = {
        **_TensorUnpickler.known,
        ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"): reductions.rebuild_typed_storage,
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"): reductions.rebuild_storage_filename,
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _rebuild_on_device,
        ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
        ("torch.storage", "TypedStorage"): torch.TypedStorage,
        ("torch", "Tensor"): Tensor,
        ("torch", "Size"): torch.Size,
        ("types", "SimpleNamespace"): SimpleNamespace,
        **{("torch", str(dtype).removeprefix("torch.")): dtype
           for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.float16)},
    }  # fmt: skip
