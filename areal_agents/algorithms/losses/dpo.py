"""DPO in two passes, so that a pair may lie in different micro-batches and on different ranks.

The loss depends on the weights only through one logprob sum per episode. Pass 1 computes the sums
without a gradient; here they become one coefficient per episode; pass 2 takes the gradient of
−Σ_episodes c · log π(episode) token by token. This is exactly DPO's gradient, however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from areal_agents.algorithms.losses.likelihood import likelihood
from areal_agents.algorithms.losses.loss import SUPERVISED, LossPart, LossTokens, TokenLosses


class DpoLoss(LossPart):
    """Settings of `dpo_coefficients`, which take the place of advantages."""

    kind: Literal["dpo"] = "dpo"
    dpo_beta: float = Field(default=0.1, gt=0, description="β of DPO.")
    uses_advantages: ClassVar[bool] = False
    is_supervised: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True
    implies: ClassVar[Mapping[str, Any]] = SUPERVISED

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        return likelihood(tokens.logprobs, tokens.advantages)


@dataclass(frozen=True, slots=True)
class DpoCoefficients:
    """The coefficients of −log π of each episode's tokens in the second pass, and the loss itself.

    Attributes:
        by_episode: c = −∂loss/∂(log π), by episode id; it includes the division by the number of pairs.
        loss: mean over the pairs.
        accuracy: share of pairs whose margin is positive.
        margin: mean of β [log π/π_ref (chosen) − log π/π_ref (rejected)].
    """

    by_episode: dict[str, float]
    loss: float
    accuracy: float
    margin: float


def dpo_coefficients(
    current_sums: Mapping[str, float],
    reference_sums: Mapping[str, float],
    pairs: Sequence[tuple[str, str]],
    *,
    beta: float,
) -> DpoCoefficients:
    """Coefficients of the mean DPO loss over the pairs of one optimizer step (arXiv 2305.18290, eq. 7).

        loss = −1/P Σ log σ(m),  m = β [log π/π_ref (chosen) − log π/π_ref (rejected)]
        c(chosen) = β σ(−m) / P,  c(rejected) = −β σ(−m) / P, summed if an episode is in several pairs

    Args:
        current_sums, reference_sums: Σ log π over all trained tokens of an episode, over all of its samples,
            by episode id.
        pairs: (chosen, rejected) episode ids.

    Raises:
        ValueError: there are no pairs, an episode has no sum, or β is not positive.
    """
    if not pairs or not beta > 0:
        raise ValueError(
            f"DPO needs at least one pair and a positive beta, got {len(pairs)} pairs and beta {beta}"
        )
    missing = {e for pair in pairs for e in pair if e not in current_sums or e not in reference_sums}
    if missing:
        raise ValueError(f"every episode of a pair must have both logprob sums, missing: {sorted(missing)}")
    advantage = {e: current_sums[e] - reference_sums[e] for pair in pairs for e in pair}
    margins = beta * np.array([advantage[chosen] - advantage[rejected] for chosen, rejected in pairs])
    slopes = beta * np.exp(-np.logaddexp(0, margins)) / len(pairs)  # β σ(−m) / P without overflow
    by_episode = dict.fromkeys(advantage, 0.0)
    for (chosen, rejected), slope in zip(pairs, slopes.tolist(), strict=True):
        by_episode[chosen] += slope
        by_episode[rejected] -= slope
    return DpoCoefficients(
        by_episode,
        loss=float(np.logaddexp(0, -margins).mean()),
        accuracy=float((margins > 0).mean()),
        margin=float(margins.mean()),
    )
