"""The policy losses, one loss per token; what they are multiplied with and divided by is not theirs.

u = π_θ/π_prox throughout, given as its clamped logarithm. Each function returns ℓ_t [N], of which
`losses.policy_loss` makes Σ_t c_t w_t ℓ_t, and which tokens the clip took the gradient from or held.
With u = 1, which is every loss on its first minibatch, the gradient of each is −A ∇log π.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_agents.algorithms.losses.ratios import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """ℓ_t of each token.

    Attributes:
        values: [N], with the gradient.
        clipped_low, clipped_high: [N] bool, the ratio was clipped at its lower or upper bound.
        dual_clipped: [N] bool, the dual clip bounded the loss.
    """

    values: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor

    @classmethod
    def unclipped(cls, values: Tensor) -> TokenLosses:
        """Losses without a clip."""
        nothing = torch.zeros_like(values, dtype=torch.bool)
        return cls(values, nothing, nothing, nothing)


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
    objective = torch.minimum(unclipped, clipped)
    is_clipped = clipped < unclipped
    is_dual = torch.zeros_like(is_clipped)
    if dual_clip is not None:
        bound = dual_clip * advantages
        is_dual = (advantages < 0) & (objective < bound)
        objective = torch.where(is_dual, bound, objective)
    return TokenLosses(-objective, is_clipped & (advantages < 0), is_clipped & (advantages > 0), is_dual)


def gspo(
    log_ratio: Tensor, advantages: Tensor, sequences: Sequences, *, clip_low: float, clip_high: float
) -> TokenLosses:
    """PPO's clip on one ratio per sequence: GSPO, arXiv 2507.18071, eq. 5 to 7 and 13 to 14.

        s_i = exp(1/|y_i| Σ_t log u_t)      s_t = sg(s_i) · u_t / sg(u_t)
        ℓ_t = −min(s_t A_t, clip(s_t, 1 − ε_low, 1 + ε_high) A_t)

    This is the token form of the paper. Where a sequence has one advantage and one coefficient, it
    is GSPO itself: Σ_t of its gradients is |y_i| · ∇s_i A. Where turns have advantages of their own,
    each token keeps its own, which differentiating s_i would average away.

    Args:
        log_ratio: [N] log u, with the gradient.
        advantages: [N].
        sequences: of the same N tokens; a token that does not count there is in no mean.
    """
    detached = log_ratio.detach()
    sequence = sequences.spread(sequences.means(detached))
    return ppo(sequence + (log_ratio - detached), advantages, clip_low=clip_low, clip_high=clip_high)


def cispo(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> TokenLosses:
    """The clipped ratio as a constant weight of the policy gradient: CISPO, arXiv 2506.13585.

        ℓ = −sg(clip(u, 1 − ε_low, 1 + ε_high)) A log π_θ

    No token loses its gradient. The paper leaves the lower bound open: ε_low = 1.

    Args:
        log_ratio: [N] log u.
        logprobs: [N] of the current policy, with the gradient.
        advantages: [N].
    """
    ratio = log_ratio.detach().exp()
    values = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs
    return TokenLosses(values, ratio < 1 - clip_low, ratio > 1 + clip_high, torch.zeros_like(ratio).bool())


def sapo(log_ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> TokenLosses:
    """A soft gate in place of the clip: SAPO, arXiv 2511.20347.

        ℓ = −(4/τ) σ(τ (u − 1)) A,  τ = τ_positive where A > 0, else τ_negative

    Its gradient is −4 p (1 − p) u A ∇log π with p = σ(τ (u − 1)): 1 at u = 1, fading on both sides.

    Args:
        log_ratio: [N] log u, with the gradient.
        advantages: [N].
    """
    tau = torch.full_like(log_ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return TokenLosses.unclipped(-4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantages)


def likelihood(logprobs: Tensor, coefficients: Tensor) -> TokenLosses:
    """ℓ = −c log π_θ: SFT with c = 1 on the chosen tokens, and DPO's second pass, see `dpo`.

    Args:
        logprobs: [N] of the current policy, with the gradient.
        coefficients: [N] c, given in place of advantages.
    """
    return TokenLosses.unclipped(-coefficients * logprobs)
