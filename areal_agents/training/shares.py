"""What one micro-batch adds to the losses of its minibatch, a share that adds up with all others."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.estimators import GaeEstimator
from areal_agents.algorithms.losses.objective import Objective, policy_loss
from areal_agents.algorithms.losses.observation import observation_loss
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
) -> tuple[Tensor, LossStatistics, Tensor | None]:
    """The policy's loss with that of the observations, and what is known of both.

    Without proximal logprobs the current ones, detached, are they.

    Returns:
        The loss; the statistics, of tokens of the policy only; and of the observations [2] float64, the sum
        of their cross entropies and their number, None without any.
    """
    batch = work.batch
    targets: TopTargets | FullTargets | None = None
    if isinstance(teacher, HeldTeacher):
        targets = teacher.targets(batch)
    elif scores.teacher is not None:
        targets = TopTargets(scores.teacher.ids[work.places], scores.teacher.logprobs[work.places])
    current, entropy, divergence = policy(
        batch, entropy_gradient=algorithm.entropy_coefficient > 0, teacher=targets
    )
    sampled = None if batch.observed is None else ~batch.observed

    def of_policy(values: Tensor) -> Tensor:
        return values if sampled is None else values[sampled]

    def share(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else of_policy(whole[work.places])

    proximal = share(scores.proximal)
    loss, statistics = policy_loss(
        of_policy(current),
        Objective.of(algorithm),
        proximal=of_policy(current).detach() if proximal is None else proximal,
        behavior=of_policy(batch.behavior_logprobs),
        advantages=of_policy(advantages[work.places]),
        loss_weights=of_policy(batch.loss_weights),
        sequence_ids=of_policy(batch.sample_index),
        turn_ids=of_policy(batch.turn_ids),
        reference=share(scores.reference),
        entropy=of_policy(entropy),
        on_policy=of_policy(batch.versions) == version,
        keep=share(scores.keep),
        penalty=share(scores.penalty),
        trained=of_policy(batch.trained),
        divergence=None if divergence is None else of_policy(divergence),
    )
    if batch.observed is None:
        return loss, statistics, None
    logprobs = current[batch.observed]
    added = observation_loss(logprobs, batch.loss_weights[batch.observed])
    entropies = -logprobs.detach().double().sum()
    counted = torch.stack([entropies, entropies.new_tensor(len(logprobs))])
    return loss + algorithm.observation_coefficient * added, statistics, counted


def value_share(critic: Critic, work: Work, scores: Scores, estimator: GaeEstimator) -> tuple[Tensor, Tensor]:
    """The critic's loss, and [2] float64: the loss without its coefficient, and the clipped tokens."""
    assert scores.values is not None and scores.value_targets is not None
    trained, places = work.batch.trained, work.places[work.batch.trained]
    loss, clipped = value_loss(
        critic(work.batch)[trained],
        old_values=scores.values[places],
        targets=scores.value_targets[places],
        loss_weights=work.batch.loss_weights[trained],
        clip=estimator.value_clip,
    )
    return estimator.value_coefficient * loss, torch.stack([loss.detach().double(), clipped])
