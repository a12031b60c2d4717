"""Computes the logprobs of a recorded turn under other weights, with the forward pass of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from areal_agents.algorithms.ordering import trajectories
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.training.distributed import ranks
from areal_agents.training.model.model import ModelOptions, Policy, load_policy


def rescored(
    model: Path,
    episode: RecordedEpisode,
    turn_id: str,
    *,
    adapter: Path | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> list[float]:
    """Return the logprobs [C] of a turn's sampled tokens under a model, at the turn's temperature.

    Args:
        adapter: a folder with an adapter in PEFT's form, which is merged into the model.
        dtype: the compute type; auto: bfloat16 on a GPU, float32 on a CPU.

    Raises:
        TrainingError: the weights cannot be loaded, or the adapter does not fit the model.
    """
    sample = _sample_of(episode, turn_id)
    (batch,) = pack([sample], token_budget=len(sample))
    with ranks("auto") as alone, torch.no_grad():
        on_gpu = alone.device.type == "cuda"
        half = dtype == "bfloat16" or (dtype == "auto" and on_gpu)
        options = ModelOptions(dtype=torch.bfloat16 if half else torch.float32, frozen=True)
        policy = load_policy(model, alone, options=options)
        if adapter is not None:
            _merge(policy, adapter)
        logprobs = policy(batch.to(alone.device))[0]
    return [float(value) for value in logprobs.cpu()]


def _sample_of(episode: RecordedEpisode, turn_id: str) -> TrainingSample:
    """A sample of the path to a turn, in which the turn's sampled tokens are scored."""
    path = next(path for path in trajectories(episode) if any(turn.id == turn_id for turn in path.turns))
    place = [turn.id for turn in path.turns].index(turn_id)
    mask = path.sampled_mask & (path.turn_index == place)
    end = int(np.flatnonzero(mask)[-1]) + 1
    return TrainingSample(
        token_ids=path.token_ids[:end],
        loss_mask=mask[:end],
        behavior_logprobs=path.behavior_logprobs[:end],
        versions=path.versions[:end],
        temperatures=path.temperatures[:end],
        advantages=np.zeros(end, np.float32),
        turn_index=path.turn_index[:end],
        episode_id=episode.id,
        group_id="",
    )


def _merge(policy: Policy, adapter: Path) -> None:
    """Add (alpha / rank) · B A of every adapted layer to its weight, in place."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / "adapter_model.safetensors")
    parameters = dict(policy.named_parameters())
    for name, a in weights.items():
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if not name.endswith(".lora_A.weight"):
            continue
        found = [own for own in parameters if own.endswith(f"{layer}.weight")]
        if len(found) != 1:
            raise TrainingError(f"{adapter}: the model has {len(found)} layers {layer}, expected one")
        weight = parameters[found[0]]
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        b = weights[name.replace(".lora_A.", ".lora_B.")]
        delta = (config["lora_alpha"] / config["r"]) * (b.float() @ a.float())
        local += delta.to(local)
