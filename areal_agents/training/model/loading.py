"""Loads a Hugging Face folder into a sharded model; weights are read from the files directly into the shards.

A rank reads only the rows that it holds, one tensor at a time, in the type of the files. Names and layouts
are converted by transformers' own conversion mapping, in both directions: for example, a published checkpoint
has one tensor per expert where the model has one tensor for all experts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from areal_agents.errors import TrainingError
from areal_agents.training.model import attention
from areal_agents.training.model.compatibility import check_layers, logit_scale
from areal_agents.training.model.images import SUPPORTED, sees_images
from areal_agents.training.model.nf4 import NAME as PACKED
from areal_agents.training.model.nf4 import QuantizedWeight
from areal_agents.training.model.safetensors_files import Checkpoint, Stored
from areal_agents.training.model.sharding import local_rows

_SHOWN = 8  # maximum number of names in an error


def build_model(folder: Path, *, head: bool = True) -> tuple[PreTrainedModel, torch.dtype]:
    """Return the folder's model on the meta device, without weights, and the type of its saved weights.

    Args:
        head: whether to include the output matrix; otherwise only the backbone is returned.

    Raises:
        TrainingError: the folder does not exist, transformers cannot read its configuration, or the model
            cannot be trained (see `compatibility`).
    """
    if not folder.is_dir():
        raise TrainingError(f"{folder}: cannot load the model: there is no such folder")
    attention.register()
    try:
        config = AutoConfig.from_pretrained(folder)
        saved_dtype = config.dtype or torch.float32  # the model's own output matrix replaces it below
        kind: Any = AutoModelForCausalLM if head else AutoModel
        kernels: str | dict[str, str] = attention.NAME
        if sees_images(config):
            if config.model_type not in SUPPORTED:
                raise ValueError(
                    f"{config.model_type} takes images; of such models only {SUPPORTED} can be trained"
                )
            kind = AutoModelForImageTextToText if head else AutoModel
            kernels = {"text_config": attention.NAME, "vision_config": "sdpa"}
        with torch.device("meta"):
            model = kind.from_config(config, dtype=torch.float32, attn_implementation=kernels)
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise TrainingError(
                f"{folder}: cannot load the model: its configuration lacks {error}"
            ) from error
        raise TrainingError(  # the family selects among its own attention classes by this name
            f"{folder}: packed samples would influence each other in {config.model_type}, whose "
            "attention does "
            "not go through transformers' attention interface; choose a model of another family"
        ) from error
    except Exception as error:  # transformers raises exceptions of several libraries for an invalid folder
        raise TrainingError(f"{folder}: cannot load the model: {error}") from error
    try:
        check_layers(model)
        if head:
            logit_scale(model)
    except TrainingError as error:
        raise TrainingError(f"{folder}: {error}") from error
    config.get_text_config().attention_dropout = 0.0
    return model, saved_dtype


def load_weights(model: PreTrainedModel, folder: Path) -> int:
    """Fill the parameters and persistent buffers of a sharded model, in place.

    Adapters are left unchanged. Tied weights may be stored under any of their names.

    Returns:
        The number of bytes of tensor data that this rank has read.

    Raises:
        TrainingError: a weight is missing, unexpected or has the wrong shape, or a file is invalid; the
            message names the weight and the file.
    """
    checkpoint = Checkpoint(folder)
    targets = base_state(model)
    recipes, extra = _recipes(model, checkpoint, targets)
    missing = set(targets) - {name for recipe in recipes for name in recipe.targets}
    for name, source in tied_weights(model).items():
        if source in missing and name not in missing:  # saved under the other name
            missing.remove(source)
        missing.discard(name)
    _complain(folder, "extra weights", [f"{key} ({checkpoint.tensors[key].file.name})" for key in extra])
    _complain(folder, "missing weights", sorted(missing))
    _complain(folder, "mismatched weights", [text for r in recipes for text in r.misshapen(targets)])
    with torch.no_grad():
        for recipe in recipes:
            _fill(targets, recipe, checkpoint, model)
    return checkpoint.bytes_read


Target = Tensor | QuantizedWeight


def base_state(model: PreTrainedModel) -> dict[str, Target]:
    """The model's state dict without adapters, under the names that the weights have without adapters, and
    without quantisation."""
    state: dict[str, Target] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        name = name.replace(".base_layer.", ".")
        if name.endswith(f".{PACKED}"):
            state[name.removesuffix(PACKED) + "weight"] = QuantizedWeight(tensor)
        else:
            state[name] = tensor
    return state


def tied_weights(model: PreTrainedModel) -> dict[str, str]:
    """Return the names of tied weights → the name of the weight that they share."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The source of parameters: one stored tensor, or the sources of a conversion, by pattern."""

    targets: tuple[str, ...]
    sources: Sequence[tuple[str, Stored]]
    converter: WeightConverter | None

    @property
    def files(self) -> str:
        """The file names, for error messages."""
        return ", ".join(sorted({str(stored.file) for _, stored in self.sources}))

    def misshapen(self, targets: Mapping[str, Target]) -> Iterable[str]:
        """Describe the wrong shape of a stored tensor that is used without conversion."""
        _, stored = self.sources[0]
        want = tuple(targets[self.targets[0]].shape)
        if self.converter is None and stored.shape != want:
            yield f"{stored.name} ({stored.file.name}) of shape {stored.shape}, expected {want}"

    def is_by_expert(self, experts: int) -> bool:
        """Whether row e of the parameter is made from the e-th source of each pattern only."""
        if self.converter is None or len(self.targets) > 1:
            return False
        first, *others = self.converter.operations
        counts = set(Counter(pattern for pattern, _ in self.sources).values())
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and counts == {experts}
            and all(isinstance(op, Concatenate) and op.dim > 0 for op in others)
        )


def _recipes(
    model: PreTrainedModel, checkpoint: Checkpoint, targets: Mapping[str, Target]
) -> tuple[list[_Recipe], list[str]]:
    """Return the source of each parameter, and the stored tensors that no parameter uses."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    found: dict[str, tuple[list[tuple[str, Stored]], WeightConverter | None]] = {}
    extra = []
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, targets)
        if name not in targets and key in targets:
            name, pattern = key, None  # the file already has the model's layout
        if name not in targets:
            if not _is_ignored(model, key):
                extra.append(key)
            continue
        sources, _ = found.setdefault(name, ([], None if pattern is None else by_pattern[pattern]))
        sources.append((pattern or key, checkpoint.tensors[key]))
    # transformers reads from here the conversions to revert; see gathering.py
    model._weight_conversions = [e for e in mapping if e.was_used() or isinstance(e, WeightConverter)]
    recipes = []
    for name, (sources, converter) in found.items():
        names = [name]
        if converter is not None:
            first, *others = converter.target_patterns
            names += [name.replace(first, other) for other in others]
        recipes.append(_Recipe(tuple(names), sources, converter))
    return recipes, extra


def _is_ignored(model: PreTrainedModel, key: str) -> bool:
    """Whether the model declares the weight as unused, or the weight is the head and only the backbone is
    loaded."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    headless = model.base_model is model and not key.startswith(f"{model.base_model_prefix}.")
    return headless or any(re.search(pattern, key) for pattern in patterns)


def _complain(folder: Path, what: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise TrainingError(f"{folder}: {what} {list(names[:_SHOWN])}{more}")


def _fill(
    targets: Mapping[str, Target], recipe: _Recipe, checkpoint: Checkpoint, model: PreTrainedModel
) -> None:
    """Read this rank's shards of the recipe's parameters."""
    first = targets[recipe.targets[0]]
    rows = local_rows(_tensor(first))
    if recipe.converter is None:
        _copy(checkpoint.read(recipe.sources[0][1], rows.start, rows.stop), first, recipe)
    elif recipe.is_by_expert(len(_tensor(first))):
        if rows.start < rows.stop:
            _copy(_convert(recipe, checkpoint, model, rows)[recipe.targets[0]], first, recipe)
    else:  # only one parameter at a time is whole on each rank
        for name, made in _convert(recipe, checkpoint, model, None).items():
            rows = local_rows(_tensor(targets[name]))
            _copy(made[rows] if made.ndim else made, targets[name], recipe)


def _convert(
    recipe: _Recipe, checkpoint: Checkpoint, model: PreTrainedModel, experts: slice | None
) -> dict[str, Tensor]:
    """Return the parameters by name, converted from all sources or from those of some experts."""
    converter = deepcopy(recipe.converter)
    assert converter is not None
    name, seen = recipe.targets[0], Counter[str]()
    for pattern, stored in recipe.sources:
        if experts is None or experts.start <= seen[pattern] < experts.stop:
            converter.add_tensor(name, stored.name, pattern, partial(checkpoint.read, stored))
        seen[pattern] += 1
    try:
        made = converter.convert(name, model=model, config=model.config)
    except (RuntimeError, ValueError) as error:
        raise TrainingError(
            f"{recipe.files}: cannot convert the stored weights to {name}: {error}"
        ) from error
    return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def _copy(made: Tensor, target: Target, recipe: _Recipe) -> None:
    """Set this rank's rows of a parameter."""
    tensor = _tensor(target)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    expected = (*local.shape[:1], *target.shape[1:])
    if made.shape != expected:
        raise TrainingError(
            f"{recipe.files}: mismatched weights for {recipe.targets[0]}: "
            f"got shape {tuple(made.shape)}, expected {expected}"
        )
    if isinstance(target, QuantizedWeight):
        target.fill(made)
    else:
        local.copy_(made)


def _tensor(target: Target) -> Tensor:
    """The tensor that is sharded."""
    return target.packed if isinstance(target, QuantizedWeight) else target
