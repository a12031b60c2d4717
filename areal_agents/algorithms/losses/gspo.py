"""GSPO: PPO's clip on one ratio per sequence, or per turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_agents.algorithms.losses.loss import LossPart, LossTokens, TokenLosses
from areal_agents.algorithms.losses.ppo import ppo

if TYPE_CHECKING:
    from torch import Tensor

    from areal_agents.algorithms.losses.ratios import Sequences


class GspoLoss(LossPart):
    """Settings of `gspo`."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped at 1 + clip_high.")
    gspo_level: Literal["sequence", "turn"] = Field(
        default="sequence", description="The unit over which the geometric mean of the ratios is computed."
    )

    @property
    def ratio_level(self) -> str:
        return self.gspo_level

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        groups = tokens.turns if self.gspo_level == "turn" else tokens.sequences
        return gspo(
            tokens.log_ratio, tokens.advantages, groups, clip_low=self.clip_low, clip_high=self.clip_high
        )


def gspo(
    log_ratio: Tensor, advantages: Tensor, sequences: Sequences, *, clip_low: float, clip_high: float
) -> TokenLosses:
    """PPO's clip on one ratio per sequence: GSPO, arXiv 2507.18071, eq. 5 to 7 and 13 to 14.

        s_i = exp(1/|y_i| Σ_t log u_t)      s_t = sg(s_i) · u_t / sg(u_t)
        ℓ_t = −min(s_t A_t, clip(s_t, 1 − ε_low, 1 + ε_high) A_t)

    This is the token form of the paper. Where a sequence has one advantage and one coefficient, it
    is GSPO itself: Σ_t of its gradients is |y_i| · ∇s_i A. Where turns have advantages of their own,
    each token keeps its own, which differentiating s_i would average away. With one sequence per turn it is
    the turn-level ratio of arXiv 2511.20718, eq. 8, in its length-normalised form.

    Args:
        log_ratio: [N] log u, with the gradient.
        advantages: [N].
        sequences: grouping of the same N tokens; a token that does not count there is in no mean.
    """
    detached = log_ratio.detach()
    sequence = sequences.spread(sequences.means(detached))
    losses = ppo(sequence + (log_ratio - detached), advantages, clip_low=clip_low, clip_high=clip_high)
    return replace(losses, ratio=sequence.exp())
