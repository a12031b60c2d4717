"""PPO's clipped loss, with separate lower and upper bounds and an optional dual clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_agents.algorithms.losses.loss import LossPart, LossTokens, TokenLosses

if TYPE_CHECKING:
    from torch import Tensor


class PpoLoss(LossPart):
    """Settings of `ppo`."""

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped at 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="For negative advantages, the objective is at least this factor times the advantage.",
    )

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        return ppo(
            tokens.log_ratio,
            tokens.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


def ppo(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """PPO's clipped loss (arXiv 1707.06347, eq. 7), with two bounds (arXiv 2503.14476, eq. 10).

        ℓ = −min(u A, clip(u, 1 − ε_low, 1 + ε_high) A)
        dual clip (arXiv 1912.09729): where A < 0, ℓ = −max(min(…), c A), with c > 1

    Args:
        log_ratio: [N] log u, with the gradient.
        advantages: [N].
    """
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = unclipped.minimum(clipped)
    is_clipped = clipped < unclipped
    is_dual = None
    if dual_clip is not None:
        bound = dual_clip * advantages
        is_dual = (advantages < 0) & (objective < bound)
        objective = bound.where(is_dual, objective)
    return TokenLosses(-objective, is_clipped & (advantages < 0), is_clipped & (advantages > 0), is_dual)
