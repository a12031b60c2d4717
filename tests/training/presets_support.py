"""Takes one step of any preset on a tiny model, and returns the weights after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from training_support import VOCAB, episode_groups

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.distillation import DistillationLoss
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.core.rollout import RolloutGroup
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.critic import CriticState, load_critic
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.model.run_models import load_reference
from areal_agents.training.step.step import StepOptions, StepResult, train_batch
from areal_agents.training.step.teacher import HeldTeacher, SelfTeacher, Teacher

WHOLE = StepOptions(microbatch_tokens=4096, share_prefixes=True, grad_clip=1e9)


def groups(names: Sequence[str] = "abcd") -> list[RolloutGroup]:
    """Return groups that differ in everything that an algorithm uses."""
    return episode_groups(np.random.default_rng(1), names)


def preset(name: str, **fields: object) -> AlgorithmConfig:
    """Return a preset with settings that suit episodes of a few dozen tokens."""
    small: dict[str, dict[str, float]] = {
        "dapo": {"overlong_limit": 24, "overlong_buffer": 12},
        "clip_cov": {"clip_cov_share": 0.1, "clip_cov_low": 0.05},
        "kl_cov": {"kl_cov_share": 0.1},
        "maxrl": {"reward_bias": 5.0},  # some scores of `groups` are negative
    }
    return AlgorithmConfig.model_validate({"preset": name, **small.get(name, {}), **fields})


def train_once(
    algorithm: AlgorithmConfig,
    folder: Path,
    reference_folder: Path,
    ranks: Ranks,
    *,
    data: TrainingData | None = None,
    options: StepOptions = WHOLE,
    lr: float = 0.05,
    chunk_logits: int | None = None,
    version: int = 0,
) -> tuple[StepResult, dict[str, Tensor]]:
    """Train new models on one batch by plain SGD, so that the weights change by a multiple of the gradient.

    Returns:
        The result, and all weights after the step; the names of the critic's weights begin with `critic.`.
    """
    policy = load_policy(folder, ranks)
    if chunk_logits is not None:
        policy.chunk_logits = chunk_logits
    critic = None
    if algorithm.needs_critic:
        model = load_critic(folder, ranks)
        critic = CriticState(model, torch.optim.SGD(model.parameters(), lr=lr))
    result = train_batch(
        policy,
        torch.optim.SGD(policy.parameters(), lr=lr),
        (data or build_training_data(groups(), algorithm)) if ranks.is_first else None,
        algorithm,
        options,
        ranks=ranks,
        version=version,
        seed=0,
        critic=critic,
        reference=load_reference(reference_folder, ranks) if algorithm.needs_reference else None,
        teacher=teacher_of(algorithm, reference_folder, ranks),
    )
    weights = policy.full_state_dict()
    if critic is not None:
        weights |= {f"critic.{name}": whole(p) for name, p in critic.critic.named_parameters()}
    return result, weights


def teacher_of(algorithm: AlgorithmConfig, folder: Path, ranks: Ranks) -> Teacher | None:
    """Return the teacher of a distillation preset, from `folder` if the trainer holds it; or None."""
    loss = algorithm.policy_loss
    if not isinstance(loss, DistillationLoss):
        return None
    if loss.teacher == "self":
        return SelfTeacher(loss.distill_top_k)
    return HeldTeacher(str(folder), ranks, vocab_size=VOCAB, options=ModelOptions())


def whole(tensor: Tensor) -> Tensor:
    """Return an unsharded copy of a tensor. Collective."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest difference between two sets of weights; NaN if a weight is NaN."""
    assert left.keys() == right.keys()
    return float(torch.stack([(left[name] - right[name]).abs().max() for name in left]).max())
