"""The share of a minibatch's losses that one micro-batch contributes; the shares of all micro-batches add up.

DPO needs a first pass, which sums logprobs by episode and derives the coefficient of each token from them.
The sums are complete before the second pass begins, so the pairs of a minibatch may lie anywhere among
its micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.estimators import GaeEstimator
from areal_agents.algorithms.losses.dpo import DpoCoefficients, dpo_coefficients
from areal_agents.algorithms.losses.objective import Objective, TokenTerms, policy_loss
from areal_agents.algorithms.losses.observation import observation_loss
from areal_agents.algorithms.losses.statistics import LossStatistics
from areal_agents.algorithms.losses.value import value_loss
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.critic import Critic
from areal_agents.training.model.experts import rerouted_share
from areal_agents.training.model.model import Policy
from areal_agents.training.step.divergence import FullTargets, TopTargets
from areal_agents.training.step.plan import BatchPlan, Minibatch, PlannedMicroBatch, by_sample
from areal_agents.training.step.proximal_pass import Scores, score
from areal_agents.training.step.teacher import HeldTeacher, Teacher


def policy_share(
    policy: Policy,
    work: PlannedMicroBatch,
    scores: Scores,
    advantages: Tensor,
    algorithm: AlgorithmConfig,
    *,
    version: int,
    teacher: Teacher | None = None,
) -> tuple[Tensor, LossStatistics, Tensor | None, TokenTerms]:
    """The policy's loss plus the loss of observations, and the statistics of both.

    If there are no proximal logprobs, the current ones, detached, take their place.

    Returns:
        The loss; the statistics of the policy's tokens; and for the observations [2] float64, the sum of
        their cross entropies and their number, or None if there are none; and the terms of each token of the
        policy.
    """
    batch = work.batch
    targets: TopTargets | FullTargets | None = None
    if isinstance(teacher, HeldTeacher):
        targets = teacher.targets(batch)
    elif scores.teacher is not None:
        targets = TopTargets(scores.teacher.ids[work.indices], scores.teacher.logprobs[work.indices])
    current, entropy, divergence = policy(
        batch, entropy_gradient=algorithm.entropy_coefficient > 0, teacher=targets
    )
    sampled = None if batch.observed is None else ~batch.observed

    def of_policy(values: Tensor) -> Tensor:
        return values if sampled is None else values[sampled]

    def share(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else of_policy(whole[work.indices])

    proximal = share(scores.proximal)
    replayed = rerouted = None
    if batch.routed_experts is not None:  # -1 where the engine returned no experts
        replayed = (batch.routed_experts[batch.predictor_rows] >= 0).flatten(1).any(1)
        rerouted = rerouted_share(policy.model)
    loss, statistics, terms = policy_loss(
        of_policy(current),
        Objective.of(algorithm),
        proximal=of_policy(current).detach() if proximal is None else proximal,
        behavior=of_policy(batch.behavior_logprobs),
        advantages=of_policy(advantages[work.indices]),
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
        positions=of_policy(batch.position_ids[batch.predictor_rows] + 1),
        replayed=None if replayed is None else of_policy(replayed),
        rerouted=None if rerouted is None else of_policy(rerouted[batch.predictor_rows]),
    )
    if batch.observed is None:
        return loss, statistics, None, terms
    logprobs = current[batch.observed]
    added = observation_loss(logprobs, batch.loss_weights[batch.observed])
    entropies = -logprobs.detach().double().sum()
    counted = torch.stack([entropies, entropies.new_tensor(len(logprobs))])
    return loss + algorithm.observation_coefficient * added, statistics, counted, terms


def value_share(
    critic: Critic, work: PlannedMicroBatch, scores: Scores, estimator: GaeEstimator
) -> tuple[Tensor, Tensor]:
    """The critic's loss, and [2] float64: the loss without its coefficient, and the clipped tokens."""
    assert scores.values is not None and scores.value_targets is not None
    trained, indices = work.batch.trained, work.indices[work.batch.trained]
    loss, clipped = value_loss(
        critic(work.batch)[trained],
        old_values=scores.values[indices],
        targets=scores.value_targets[indices],
        loss_weights=work.batch.loss_weights[trained],
        clip=estimator.value_clip,
    )
    return estimator.value_coefficient * loss, torch.stack([loss.detach().double(), clipped])


def pair_pass(
    policy: Policy,
    plan: BatchPlan,
    minibatch: Minibatch,
    scores: Scores,
    *,
    beta: float,
    ranks: Ranks,
    check_stop: Callable[[], None],
) -> tuple[Tensor, DpoCoefficients]:
    """The coefficients of a minibatch's pairs under the current weights. Collective.

    Returns:
        [M] in place of advantages, each token of the minibatch with the coefficient of its episode; and
        the coefficients.

    Raises:
        ValueError: an episode of a pair without a trained token.
    """
    assert scores.reference is not None
    current = score(
        lambda batch: policy(batch)[0], minibatch.work, tokens=plan.tokens, ranks=ranks, check_stop=check_stop
    )
    reference = scores.reference

    def coefficients_of_pairs() -> tuple[Tensor, DpoCoefficients]:
        assert plan.data is not None
        here = {sample.episode_id for sample in minibatch.samples}
        coefficients = dpo_coefficients(
            _episode_sums(minibatch, current),
            _episode_sums(minibatch, reference),
            [pair for pair in plan.data.pairs if here.intersection(pair)],
            beta=beta,
        )
        per_sample = [
            coefficients.by_episode.get(sample.episode_id, 0.0)
            * sample.loss_mask[sample.scored_mask].astype(np.float32)
            for sample in minibatch.samples
        ]
        return torch.from_numpy(np.concatenate(per_sample)), coefficients

    of_tokens, coefficients = ranks.from_first(coefficients_of_pairs)
    advantages = torch.zeros_like(current)
    advantages[minibatch.tokens] = of_tokens.to(current.device)
    return advantages, coefficients


def _episode_sums(minibatch: Minibatch, logprobs: Tensor) -> dict[str, float]:
    """Sum the logprobs [M] over the trained tokens of each episode of a minibatch, in float64, by episode
    id."""
    sums: dict[str, float] = {}
    arrays = by_sample(logprobs[minibatch.tokens], minibatch.samples)
    for sample, values in zip(minibatch.samples, arrays, strict=True):
        trained = values[sample.loss_mask[sample.scored_mask]]
        sums[sample.episode_id] = sums.get(sample.episode_id, 0.0) + float(trained.sum(dtype=np.float64))
    return sums
