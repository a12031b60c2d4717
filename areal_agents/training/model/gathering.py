"""Gathers whole weights from shards one at a time, in the names and layouts of published checkpoints.

No rank ever holds more than the parameters from which one published weight is made, which is a single
parameter in almost every architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from areal_agents.training.model.loading import base_state, tied_weights
from areal_agents.training.model.lora import LoraOptions, adapter_tensors, merged
from areal_agents.training.model.nf4 import QuantizedWeight, dequantize

Shape = tuple[int, ...]

_LAYER = re.compile(r"^(.*?\.\d+\.)")


def published_shapes(model: PreTrainedModel) -> dict[str, Shape]:
    """Return the shape of every weight that `whole_weights` yields, by name, in the same order. Not
    collective."""
    parameters = _shapes(model)
    return {
        name: shape
        for names in _units(model, parameters)
        for name, shape in _reverted_shapes(model, {n: parameters[n] for n in names}).items()
    }


def whole_weights(model: PreTrainedModel, lora: LoraOptions | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight, unsharded, float32, on the device of the ranks. Tied weights are yielded once.

    Collective: every rank must exhaust it. A tensor may share the parameter's memory: read it before the next
    training step, and do not write to it. An adapter is merged:
    W + (alpha / rank) · B A.
    """
    # the plan is made now; the weights are gathered as they are read
    return _gathered(model, lora, _units(model, _shapes(model)))


def _gathered(
    model: PreTrainedModel, lora: LoraOptions | None, units: Iterable[list[str]]
) -> Iterator[tuple[str, Tensor]]:
    state, adapters = base_state(model), adapter_tensors(model)
    for names in units:
        parts = {}
        for name in names:
            parts[name] = whole(state[name]).float()
            if name in adapters and lora is not None:
                a, b = adapters[name]
                parts[name] = merged(parts[name], whole(a).float(), whole(b).float(), lora)
        yield from revert_weight_conversion(model, parts).items()


def whole_adapter(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters' factors like `whole_weights`, under peft's names."""
    for name, factors in adapter_tensors(model).items():
        for part, factor in zip("AB", factors, strict=True):
            yield f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight", whole(factor).float()


def _shapes(model: PreTrainedModel) -> dict[str, Shape]:
    """Return the shapes of the published parameters and persistent buffers, under the model's own names."""
    tied = tied_weights(model)
    return {name: tuple(tensor.shape) for name, tensor in base_state(model).items() if name not in tied}


def _units(model: PreTrainedModel, parameters: Mapping[str, Shape]) -> list[list[str]]:
    """Return the parameters in groups that can be published independently.

    A group is one parameter or, if published weights are made from several parameters, all such parameters of
    a layer.
    """
    whole = _reverted_shapes(model, parameters)
    units: dict[str, list[str]] = {}
    for name, shape in parameters.items():
        alone = _reverted_shapes(model, {name: shape})
        if alone.items() <= whole.items():
            units[name] = [name]
        else:
            layer = _LAYER.match(name)
            units.setdefault(layer[1] if layer else "", []).append(name)
    return list(units.values())


def _reverted_shapes(model: PreTrainedModel, parameters: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the published shapes of parameters with these shapes."""
    reverted = revert_weight_conversion(
        model, {name: torch.empty(shape, device="meta") for name, shape in parameters.items()}
    )
    return {name: tuple(tensor.shape) for name, tensor in reverted.items()}


def whole(tensor: Tensor | QuantizedWeight) -> Tensor:
    """Return a tensor unsharded, on the device of the ranks, wherever its shards are. Collective.

    A quantised weight is returned in float32.
    """
    if isinstance(tensor, QuantizedWeight):
        return dequantize(whole(tensor.packed), torch.float32)
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    here: Any = tensor.to(tensor.device_mesh.device_type)
    gathered: Tensor = here.full_tensor()
    return gathered
