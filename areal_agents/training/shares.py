"""What one micro-batch adds to the losses of its minibatch, a share that adds up with all others."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.estimators import GaeEstimator
from areal_agents.algorithms.losses.objective import Objective, policy_loss
from areal_agents.algorithms.losses.statistics import LossStatistics
from areal_agents.algorithms.losses.value import value_loss
from areal_agents.training.critic import Critic
from areal_agents.training.divergence import FullTargets, TopTargets
from areal_agents.training.model import Policy
from areal_agents.training.plan import Work
from areal_agents.training.scoring import Scores
from areal_agents.training.teacher import HeldTeacher, Teacher


def policy_share(
    policy: Policy,
    work: Work,
    scores: Scores,
    advantages: Tensor,
    algorithm: AlgorithmConfig,
    *,
    version: int,
    teacher: Teacher | None = None,
) -> tuple[Tensor, LossStatistics]:
    """The policy's loss; without proximal logprobs the current ones, detached, are they."""
    batch = work.batch
    targets: TopTargets | FullTargets | None = None
    if isinstance(teacher, HeldTeacher):
        targets = teacher.targets(batch)
    elif scores.teacher is not None:
        targets = TopTargets(scores.teacher.ids[work.places], scores.teacher.logprobs[work.places])
    current, entropy, divergence = policy(
        batch, entropy_gradient=algorithm.entropy_coefficient > 0, teacher=targets
    )

    def share(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else whole[work.places]

    proximal = share(scores.proximal)
    return policy_loss(
        current,
        Objective.of(algorithm),
        proximal=current.detach() if proximal is None else proximal,
        behavior=batch.behavior_logprobs,
        advantages=advantages[work.places],
        loss_weights=batch.loss_weights,
        sequence_ids=batch.sample_index,
        turn_ids=batch.turn_ids,
        reference=share(scores.reference),
        entropy=entropy,
        on_policy=batch.versions == version,
        keep=share(scores.keep),
        penalty=share(scores.penalty),
        trained=batch.trained,
        divergence=divergence,
    )


def value_share(critic: Critic, work: Work, scores: Scores, estimator: GaeEstimator) -> tuple[Tensor, Tensor]:
    """The critic's loss, and [2] float64: the loss without its coefficient, and the clipped tokens."""
    assert scores.values is not None and scores.value_targets is not None
    loss, clipped = value_loss(
        critic(work.batch),
        old_values=scores.values[work.places],
        targets=scores.value_targets[work.places],
        loss_weights=work.batch.loss_weights,
        clip=estimator.value_clip,
    )
    return estimator.value_coefficient * loss, torch.stack([loss.detach().double(), clipped])
