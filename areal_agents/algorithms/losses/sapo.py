"""SAPO: a soft gate in place of the clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_agents.algorithms.losses.loss import LossPart, LossTokens, TokenLosses

if TYPE_CHECKING:
    from torch import Tensor


class SapoLoss(LossPart):
    """Settings of `sapo`."""

    kind: Literal["sapo"] = "sapo"
    sapo_tau_positive: float = Field(default=1.0, gt=0, description="SAPO's τ at positive advantages.")
    sapo_tau_negative: float = Field(default=1.05, gt=0, description="SAPO's τ at negative advantages.")

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        return sapo(
            tokens.log_ratio,
            tokens.advantages,
            tau_positive=self.sapo_tau_positive,
            tau_negative=self.sapo_tau_negative,
        )


def sapo(log_ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> TokenLosses:
    """A soft gate in place of the clip: SAPO, arXiv 2511.20347.

        ℓ = −(4/τ) σ(τ (u − 1)) A,  τ = τ_positive where A > 0, else τ_negative

    Its gradient is −4 p (1 − p) u A ∇log π with p = σ(τ (u − 1)): 1 at u = 1, fading on both sides.

    Args:
        log_ratio: [N] log u, with the gradient.
        advantages: [N].
    """
    tau = log_ratio.new_full(log_ratio.shape, tau_negative).masked_fill(advantages > 0, tau_positive)
    return TokenLosses(-4 / tau * (tau * (log_ratio.exp() - 1)).sigmoid() * advantages)
