"""Low-rank adapters by peft: the base weights are frozen, and only the adapter is trained.

Versions are published as adapters only, or merged into the weights by the transports that send whole weights.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_agents.errors import AdapterError, TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.experts import has_experts
from areal_agents.training.model.images import sees_images
from areal_agents.training.model.nf4 import use_nf4
from areal_agents.training.model.sharding import local_rows

_NAME = "default"  # peft's default adapter name


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """An adapter W + (alpha / rank) · B A on every target (LoRA, arXiv 2106.09685, §4.1).

    Attributes:
        targets: names of linear layers, as peft accepts them. "all-linear" selects all linear layers of the
            decoder's blocks, or only those of attention in a model with experts. A vision tower gets no
            adapters.
        base: the type of the frozen weights of the blocks: the compute type, or four bits (see `nf4`).
    """

    rank: int = 16
    alpha: float = 32.0
    base: Literal["dtype", "nf4"] = "dtype"
    targets: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"expected a LoRA rank of at least 1, got {self.rank}")
        if not self.targets:
            raise ValueError("expected at least one LoRA target, got none")


def add_adapters(model: PreTrainedModel, options: LoraOptions) -> None:
    """Add an adapter to every target, in place, and freeze all other weights.

    Raises:
        AdapterError: no module has the name of a target, a target is the head or is not a linear layer, or
            the base cannot be nf4.
    """
    import peft  # slow to import, and few runs need it
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets = _linear_layers(model) if options.targets == "all-linear" else options.targets
    config = _config(options, targets)
    if sees_images(model.config):
        config.exclude_modules = r".*\bvisual\..*"
    try:
        peft.inject_adapter_in_model(config, model, _NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise AdapterError(f"trainer.lora.targets: {error}") from error
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module.get_base_layer(), nn.Linear):
            kind = type(module.get_base_layer()).__name__
            raise AdapterError(f"trainer.lora.targets: {name} is {kind}, expected a linear layer")
    # logprobs are computed from its weight alone
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise AdapterError("trainer.lora.targets: the head cannot have an adapter; leave its name out")
    if options.base == "nf4":
        use_nf4(model)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """The last name components of the linear layers in the decoder's blocks. In a model with experts, only
    those of attention, because peft would also match experts by the names of the dense layers."""
    experts = has_experts(model)
    return sorted(
        {
            path.rpartition(".")[2]
            for block in model.get_decoder().layers
            for path, module in block.named_modules()
            if isinstance(module, nn.Linear) and not (experts and path.startswith("mlp."))
        }
    )


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Compute with the base weights alone inside the block.

    peft's own switch also changes which parameters require a gradient, which FSDP does not expect.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def reset_adapters(model: PreTrainedModel, ranks: Ranks) -> None:
    """Initialise A ~ U(±1/√in_features) as peft does, and B = 0, with the same values on any number of ranks.
    Collective."""
    generator = torch.Generator().manual_seed(ranks.broadcast(torch.initial_seed()))
    with torch.no_grad():
        for a, b in adapter_tensors(model).values():
            bound = 1 / math.sqrt(a.shape[1])
            whole = torch.empty(a.shape).uniform_(-bound, bound, generator=generator)
            _set(a, whole)
            _set(b, torch.zeros(b.shape))


def adapter_tensors(model: PreTrainedModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [rank, in] and B [out, rank] by the name of the weight [out, in] that they are added to."""
    state = model.state_dict()
    suffix = f".lora_A.{_NAME}.weight"
    return {
        name.removesuffix(suffix) + ".weight": (tensor, state[name.replace(".lora_A.", ".lora_B.")])
        for name, tensor in state.items()
        if name.endswith(suffix)
    }


def merged(weight: Tensor, a: Tensor, b: Tensor, options: LoraOptions) -> Tensor:
    """Return W + (alpha / rank) · B A, in float32 on W's device."""
    product = b.detach().to(weight.device) @ a.detach().to(weight.device)
    return weight + options.alpha / options.rank * product


def write_adapter(weights: Mapping[str, Tensor], path: Path, options: LoraOptions, *, base: str) -> None:
    """Write a folder that peft can load, with `weights` as `Policy.adapter_state_dict` returns them.

    An existing folder of that name is replaced; a reader never sees an incomplete folder under the name.

    Args:
        base: the model that the adapter belongs to, as a path or a name on the Hugging Face Hub.

    Raises:
        TrainingError: the folder cannot be written.
    """
    # explicit names, because engines do not support "all-linear"
    named = sorted({name.split(".")[-3] for name in weights})
    config = _config(options, named if options.targets == "all-linear" else options.targets)
    config.base_model_name_or_path = base
    config.inference_mode = True
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        config.save_pretrained(str(temporary))
        save_file(dict(weights), temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # the partial folder may be what fills the disk
        raise TrainingError(f"cannot write the adapter to {path}: {error}") from error


def _config(options: LoraOptions, targets: str | Sequence[str]) -> Any:
    import peft

    return peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _set(tensor: Tensor, whole: Tensor) -> None:
    """Write a whole value into a shard."""
    if isinstance(tensor, DTensor):
        rows = local_rows(tensor)
        tensor.to_local().copy_(whole[rows])
    else:
        tensor.copy_(whole)
