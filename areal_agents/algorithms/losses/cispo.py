"""CISPO: the clipped ratio as a constant weight of the policy gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_agents.algorithms.losses.loss import LossPart, LossTokens, TokenLosses

if TYPE_CHECKING:
    from torch import Tensor


class CispoLoss(LossPart):
    """Settings of `cispo`."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(
        default=1.0, gt=0, le=1, description="The ratio is clipped at 1 - clip_low; 1: no lower bound."
    )
    clip_high: float = Field(default=4.0, gt=0, description="The ratio is clipped at 1 + clip_high.")

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        return cispo(
            tokens.log_ratio,
            tokens.logprobs,
            tokens.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )


def cispo(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> TokenLosses:
    """The clipped ratio as a constant weight of the policy gradient: CISPO, arXiv 2506.13585, eq. 4 and 5.

        ℓ = −sg(clip(u, 1 − ε_low, 1 + ε_high)) A log π_θ

    No token loses its gradient. The paper leaves the lower bound open: ε_low = 1.

    Args:
        log_ratio: [N] log u.
        logprobs: [N] of the current policy, with the gradient.
        advantages: [N].
    """
    ratio = log_ratio.detach().exp()
    values = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs
    return TokenLosses(values, ratio < 1 - clip_low, ratio > 1 + clip_high)
