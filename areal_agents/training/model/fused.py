"""Faster blocks: compiled by torch, or with the kernels of Liger (norms, activations, rotary embedding).

Neither touches attention, which has kernels of its own, or the head, whose chunks return a logprob and an
entropy for each token; Liger's fused cross-entropy returns only a mean loss.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_agents.errors import TrainingError
from areal_agents.training.config import Fused
from areal_agents.training.model import attention
from areal_agents.training.model.experts import has_experts
from areal_agents.training.model.images import sees_images
from areal_agents.training.model.sharding import blocks

BACKEND = "inductor"


def fuse_blocks(model: PreTrainedModel, setting: Fused, device: torch.device) -> None:
    """Replace the computation of the decoder's blocks, in place; before they are checkpointed and sharded.

    Args:
        setting: `auto`: liger where it can be used, else none.

    Raises:
        TrainingError: the setting cannot be used for this model or on this device, or a package is missing.
    """
    if setting == "auto":
        setting = "liger" if device.type == "cuda" and _has_liger(model) else "none"
    if setting == "compile":
        _compile(model, device)
    elif setting == "liger":
        _use_liger(model, device)


def _compile(model: PreTrainedModel, device: torch.device) -> None:
    """Compile each block for all lengths. The code is compiled once for all blocks, in the first pass.

    Attention is left out: its plan is another Python object in each batch, for which a compiled block would
    be compiled again.
    """
    if has_experts(model):
        raise TrainingError(
            f"trainer.fused: compile is for dense blocks, and {model.config.model_type} has experts, whose "
            "numbers of tokens differ in each batch; use fused: none"
        )
    if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise TrainingError(
            "trainer.fused: compile needs a C++ compiler on a CPU; install g++ (or name one in CXX), or use "
            "fused: none"
        )
    attention.leave_uncompiled()
    for block in blocks(model):
        block.forward = torch.compile(block.forward, dynamic=True, backend=BACKEND)


def _use_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Use Liger's kernels. Its rotary embedding then serves all models of the family in this process."""
    if device.type != "cuda":
        raise TrainingError("trainer.fused: liger needs a GPU; use fused: compile or none")
    if importlib.util.find_spec("liger_kernel") is None:
        raise TrainingError(
            "trainer.fused: liger needs liger_kernel, which is not installed: pip install 'areal-agents[gpu]'"
        )
    if not _has_liger(model):
        raise TrainingError(
            "trainer.fused: liger is for dense text models of families that Liger knows, and "
            f"{model.config.model_type} is none; use fused: compile or none"
        )
    patch_with_liger(model)


def patch_with_liger(model: PreTrainedModel) -> None:
    """Replace norms, activations and the rotary embedding of a model that Liger supports.

    Liger also replaces classes and functions of the family's module, for models that are built later. Such a
    model is first built without weights, on the meta device, where a kernel of Liger would read memory that
    does not exist. So the classes are put back, and the functions are Liger's only for tensors on a GPU.
    """
    family = sys.modules[type(model).__module__]
    before = dict(vars(family))
    _liger()._apply_liger_kernel_to_instance(
        model, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
    for name, original in before.items():
        replaced = getattr(family, name)
        if replaced is not original:
            setattr(family, name, original if isinstance(original, type) else _by_device(replaced, original))


def _by_device(on_gpu: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `on_gpu` if its first argument is on a GPU, and else `elsewhere`."""

    @wraps(elsewhere)
    def chosen(first: Tensor, *rest: Any, **named: Any) -> Any:
        return (on_gpu if first.is_cuda else elsewhere)(first, *rest, **named)

    return chosen


def _has_liger(model: PreTrainedModel) -> bool:
    """Whether Liger is installed and has kernels for a dense text model."""
    if importlib.util.find_spec("liger_kernel") is None or has_experts(model) or sees_images(model.config):
        return False
    return model.config.model_type in _liger().MODEL_TYPE_TO_APPLY_LIGER_FN


def _liger() -> Any:
    """The module that replaces parts of models."""
    return importlib.import_module("liger_kernel.transformers.monkey_patch")
