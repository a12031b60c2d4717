"""PPO's surrogate loss without a clip, for methods that bound the update elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from areal_agents.algorithms.losses.loss import LossPart, LossTokens, TokenLosses

if TYPE_CHECKING:
    from torch import Tensor


class UnclippedLoss(LossPart):
    """The loss of `unclipped`; it has no settings."""

    kind: Literal["unclipped"] = "unclipped"

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        return unclipped(tokens.log_ratio, tokens.advantages)


def unclipped(log_ratio: Tensor, advantages: Tensor) -> TokenLosses:
    """PPO's surrogate without its clip, ℓ = −u A (arXiv 1707.06347, eq. 6).

    This loss does not keep the policy close to the proximal policy; combine it with a trust region.

    Args:
        log_ratio: [N] log u, with the gradient.
        advantages: [N].
    """
    return TokenLosses(-log_ratio.exp() * advantages)
