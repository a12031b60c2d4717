"""DPO's first pass: logprob sums by episode, and the coefficient that each token gets from them.

The sums are whole before the second pass begins, so the pairs of a minibatch may lie anywhere among
its micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from areal_agents.algorithms.losses.dpo import DpoCoefficients, dpo_coefficients
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import Policy
from areal_agents.training.plan import Minibatch, Plan, by_sample
from areal_agents.training.scoring import Scores, score


def pair_pass(
    policy: Policy,
    plan: Plan,
    minibatch: Minibatch,
    scores: Scores,
    *,
    beta: float,
    ranks: Ranks,
    check_stop: Callable[[], None],
) -> tuple[Tensor, DpoCoefficients]:
    """The coefficients of a minibatch's pairs under the weights as they are. Collective.

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
    here = {sample.episode_id for sample in minibatch.samples}
    coefficients = dpo_coefficients(
        _episode_sums(minibatch, current),
        _episode_sums(minibatch, scores.reference),
        [pair for pair in plan.data.pairs if here.intersection(pair)],
        beta=beta,
    )
    per_sample = [
        coefficients.by_episode.get(sample.episode_id, 0.0)
        * sample.loss_mask[sample.scored_mask].astype(np.float32)
        for sample in minibatch.samples
    ]
    advantages = torch.zeros_like(current)
    advantages[minibatch.tokens] = torch.from_numpy(np.concatenate(per_sample)).to(current.device)
    return advantages, coefficients


def _episode_sums(minibatch: Minibatch, logprobs: Tensor) -> dict[str, float]:
    """Σ logprob [M] over the trained tokens of each episode of a minibatch, by its id, in float64."""
    sums: dict[str, float] = {}
    arrays = by_sample(logprobs[minibatch.tokens], minibatch.samples)
    for sample, values in zip(minibatch.samples, arrays, strict=True):
        trained = values[sample.loss_mask[sample.scored_mask]]
        sums[sample.episode_id] = sums.get(sample.episode_id, 0.0) + float(trained.sum(dtype=np.float64))
    return sums
