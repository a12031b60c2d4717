"""DPPO: a mask on the divergence from the behavior policy instead of the clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from areal_agents.algorithms.losses.loss import LossPart, LossTokens, TokenLosses
from areal_agents.algorithms.losses.ratios import log_ratio as log_ratio_of

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["tv", "kl"]


class DppoLoss(LossPart):
    """Settings of `dppo`."""

    kind: Literal["dppo"] = "dppo"
    dppo_divergence: Divergence = Field(
        default="tv",
        description="Divergence of the sampled token's probability from the behavior policy: total variation "
        "(tv) or Kullback-Leibler (kl).",
    )
    dppo_low: float = Field(
        default=0.2,
        gt=0,
        description="Tokens with a negative advantage that became less likely are masked above this "
        "divergence.",
    )
    dppo_high: float = Field(
        default=0.2,
        gt=0,
        description="Tokens with a positive advantage that became more likely are masked above this "
        "divergence.",
    )
    dppo_kl_coefficient: float = Field(
        default=1e-3, ge=0, description="Weight of the squared log-ratio current/behavior of every token."
    )

    @model_validator(mode="after")
    def _check(self) -> DppoLoss:
        if self.dppo_divergence == "kl" and not {"dppo_low", "dppo_high"} <= self.model_fields_set:
            raise ValueError(
                "dppo_divergence: kl needs its own dppo_low and dppo_high, because the defaults are those of "
                "tv; the paper uses 0.05 for both"
            )
        return self

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        return dppo(
            tokens.log_ratio,
            tokens.logprobs,
            tokens.behavior,
            tokens.advantages,
            divergence=self.dppo_divergence,
            low=self.dppo_low,
            high=self.dppo_high,
            kl_coefficient=self.dppo_kl_coefficient,
        )


def dppo(
    log_ratio: Tensor,
    logprobs: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    *,
    divergence: Divergence,
    low: float,
    high: float,
    kl_coefficient: float,
) -> TokenLosses:
    """The policy gradient without tokens that leave the trust region: DPPO, arXiv 2602.04879, eq. 12 to 14.

        ℓ = −M u A,   w ℓ = −M (π_θ/μ) A
        M = 0 where A > 0, π_θ > μ and D > δ_high, or A < 0, π_θ < μ and D > δ_low; else 1
        binary TV:  D = |π_θ − μ|
        binary KL:  D = μ log(μ/π_θ) + (1 − μ) log((1 − μ)/(1 − π_θ))

    π_θ and μ are the probabilities of the sampled token under the current and the behavior policy. As in the
    paper the trust region is around the behavior policy, not around the proximal one: the ratio of the
    paper is π_θ/μ, which is u times the off-policy weight w = π_prox/μ of a token where w is not bounded.
    Some runs of the paper bound the ratio by 5, others do not. M has no gradient. A masked token stays in
    the denominator of the loss.

    The paper uses δ = 0.15 or 0.2 for TV and 0.05 for KL. The default 0.2 on both sides, and the term

        λ (log π_θ − log μ)²   with λ = 0.001, for every token, masked or not, without the weight w

    are those of the default loss of prime-rl; the term is that of Kimi K2.5 (arXiv 2602.02276). λ = 0 leaves
    the loss of the paper.

    Args:
        log_ratio: [N] log u, with the gradient.
        logprobs: [N] of the current policy, with the gradient.
        behavior: [N] logprobs of the behavior policy.
        advantages: [N].
        low, high: δ_low, δ_high: of a probability for TV, in nats for KL.
        kl_coefficient: λ.
    """
    moved = log_ratio_of(logprobs, behavior)
    distance = _divergence(logprobs.detach(), behavior, divergence)
    less_likely = (advantages < 0) & (moved.detach() < 0) & (distance > low)
    more_likely = (advantages > 0) & (moved.detach() > 0) & (distance > high)
    objective = (log_ratio.exp() * advantages).masked_fill(less_likely | more_likely, 0.0)
    penalty = kl_coefficient * moved.square() if kl_coefficient else None
    return TokenLosses(-objective, less_likely, more_likely, unweighted=penalty)


def _divergence(logprobs: Tensor, behavior: Tensor, kind: Divergence) -> Tensor:
    """Return [N], the divergence of two Bernoulli distributions: the sampled token against any other
    token."""
    current, sampled = logprobs.double().exp().clamp(max=1), behavior.double().exp().clamp(max=1)
    if kind == "tv":
        return (current - sampled).abs()
    rest = 1 - sampled
    own = sampled * (behavior.double() - logprobs.double())
    others = rest.where(rest > 0, rest.new_ones(())).log() - (1 - current).log()
    return own + (rest * others).where(rest > 0, rest.new_zeros(()))
