"""The loss of supervised fine-tuning: minus the logprob of recorded tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from areal_agents.algorithms.losses.loss import SUPERVISED, LossPart, LossTokens, TokenLosses

if TYPE_CHECKING:
    from torch import Tensor


class SftLoss(LossPart):
    """Settings of supervised fine-tuning: which episodes it learns from is chosen by their scores."""

    kind: Literal["sft"] = "sft"
    sft_min_score: float | None = Field(
        default=None, description="SFT on episodes of at least this score; absent: on the best of each group."
    )
    uses_advantages: ClassVar[bool] = False
    is_supervised: ClassVar[bool] = True
    implies: ClassVar[Mapping[str, Any]] = SUPERVISED

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        return likelihood(tokens.logprobs, tokens.advantages)


def likelihood(logprobs: Tensor, coefficients: Tensor) -> TokenLosses:
    """ℓ = −c log π_θ: SFT with c = 1 on the chosen tokens, and DPO's second pass, see `dpo`.

    Args:
        logprobs: [N] of the current policy, with the gradient.
        coefficients: [N] c, used instead of advantages.
    """
    return TokenLosses(-coefficients * logprobs)
