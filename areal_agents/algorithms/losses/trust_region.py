"""Trust regions: which tokens of a minibatch lose their gradient or are penalised.

The choice is made once for all tokens of a minibatch, identically on every rank, before the first
micro-batch, so it does not depend on how the minibatch is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from areal_agents.algorithms.losses.ratios import log_ratio
from areal_agents.algorithms.parts import Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenChoice:
    """The decisions of a trust region for the N trained tokens of a minibatch.

    Attributes:
        keep: [N] bool, the tokens that keep their gradient; None: all.
        penalty: [N] float32, the factor of |log u| in the loss of the token; None: no penalty.
    """

    keep: Tensor | None = None
    penalty: Tensor | None = None


class NoTrustRegion(Part):
    """Every token keeps its gradient."""

    kind: Literal["none"] = "none"


class M2po(Part):
    """Settings of `m2po_keep`."""

    kind: Literal["m2po"] = "m2po"
    m2po_threshold: float = Field(
        default=0.04, gt=0, description="Mean squared log-ratio that M2PO leaves in a batch."
    )

    def choose(
        self, behavior: Tensor, proximal: Tensor, advantages: Tensor, *, rng: np.random.Generator
    ) -> TokenChoice:
        """See `m2po_keep`."""
        return TokenChoice(keep=m2po_keep(behavior, proximal, advantages, threshold=self.m2po_threshold))


class ClipCov(Part):
    """Settings of `clip_cov_keep`."""

    kind: Literal["clip_cov"] = "clip_cov"
    clip_cov_share: float = Field(
        default=2e-4, gt=0, le=1, description="Share of a minibatch's tokens that Clip-Cov masks at random."
    )
    clip_cov_low: float = Field(
        default=1.0, description="Least covariance of a token that Clip-Cov may mask."
    )
    clip_cov_high: float = Field(
        default=5.0, description="Largest covariance of a token that Clip-Cov may mask."
    )

    @model_validator(mode="after")
    def _check(self) -> ClipCov:
        if not self.clip_cov_low < self.clip_cov_high:
            raise ValueError(
                f"clip_cov_low: {self.clip_cov_low} must be below clip_cov_high: {self.clip_cov_high}"
            )
        return self

    def choose(
        self, behavior: Tensor, proximal: Tensor, advantages: Tensor, *, rng: np.random.Generator
    ) -> TokenChoice:
        """See `clip_cov_keep`."""
        return TokenChoice(
            keep=clip_cov_keep(
                proximal,
                advantages,
                share=self.clip_cov_share,
                low=self.clip_cov_low,
                high=self.clip_cov_high,
                rng=rng,
            )
        )


class KlCov(Part):
    """Settings of `kl_cov_chosen`."""

    kind: Literal["kl_cov"] = "kl_cov"
    kl_cov_share: float = Field(
        default=2e-3,
        gt=0,
        le=1,
        description="Share of a minibatch's tokens that KL-Cov penalises, namely those with the largest "
        "covariance.",
    )
    kl_cov_coefficient: float = Field(default=1.0, gt=0, description="Weight of their KL penalty.")

    def choose(
        self, behavior: Tensor, proximal: Tensor, advantages: Tensor, *, rng: np.random.Generator
    ) -> TokenChoice:
        """See `kl_cov_chosen`."""
        chosen = kl_cov_chosen(proximal, advantages, share=self.kl_cov_share)
        return TokenChoice(penalty=self.kl_cov_coefficient * chosen.float())


TrustRegion = Annotated[NoTrustRegion | M2po | ClipCov | KlCov, Field(discriminator="kind")]


def m2po_keep(behavior: Tensor, proximal: Tensor, advantages: Tensor, *, threshold: float) -> Tensor:
    """Choose which tokens of a minibatch keep their gradient: M2PO, arXiv 2510.01161, algorithm 1.

        T = {t: A_t > 0 and r_t > 1, or A_t < 0 and r_t < 1},  r = π_prox/μ
        while mean_{t ∈ T} (log r_t)² > threshold: remove the largest from T and from the loss

    Only tokens in T, those that a clip could affect, are measured and removed; all others are kept. Among
    equal values, the later token is removed first. Removed tokens stay in the denominator of the loss, as in
    the paper (footnote 2). The paper computes r with the weights being trained; here the weights when the
    batch begins are used, which is the same on the first minibatch.

    Args:
        behavior, proximal, advantages: [N], the trained tokens of one optimizer step, over all ranks.
        threshold: in squared nats; the paper uses 0.04.

    Returns:
        [N] bool.

    Raises:
        ValueError: the threshold is not positive.
    """
    if not threshold > 0:
        raise ValueError(f"the M2PO threshold must be positive, got {threshold}")
    moved = log_ratio(proximal, behavior).double()
    constrained = (moved * advantages.sign() > 0).nonzero().squeeze(1)
    ascending, order = moved[constrained].square().sort(stable=True)
    counts = constrained.new_ones(len(ascending)).cumsum(0)
    # the mean of the n smallest values increases with n, so the kept values are a prefix
    within = ascending.cumsum(0) / counts <= threshold
    keep = moved.bool() | True
    keep[constrained[order[~within]]] = False
    return keep


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return [N] float64, each token's contribution to the covariance of logprob and advantage: arXiv
    2505.22617, eq. 10.

        Cov_t = (log π_t − mean log π) (A_t − mean A)

    Their mean is the decrease of the policy's entropy, up to the size of the step (section 4 of the paper).
    The paper computes π with the weights being trained; here the weights when the batch begins are used,
    which is the same on the first minibatch.

    Args:
        logprobs, advantages: [N], the trained tokens of one optimizer step, over all ranks.
    """
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def clip_cov_keep(
    logprobs: Tensor, advantages: Tensor, *, share: float, low: float, high: float, rng: np.random.Generator
) -> Tensor:
    """Choose which tokens of a minibatch keep their gradient: Clip-Cov, arXiv 2505.22617, eq. 11 and 12.

    Of the tokens whose covariance lies in [low, high], ⌊share · N⌋ lose their gradient, chosen at random, or
    all of them if there are fewer. They stay in the denominator of the loss. As in the paper's code, at least
    one is chosen, even if ⌊share · N⌋ is 0.

    Args:
        logprobs, advantages: as for `covariances`.
        share: share of the N tokens, in (0, 1]; the paper uses 2e-4.
        low, high: the paper uses 1 and 5.
        rng: must be in the same state on every rank.

    Returns:
        [N] bool.
    """
    keep = logprobs.bool() | True
    if not len(keep):
        return keep
    values = covariances(logprobs, advantages)
    candidates = ((values >= low) & (values <= high)).nonzero().squeeze(1)
    count = min(max(1, int(share * len(keep))), len(candidates))
    chosen = rng.choice(len(candidates), size=count, replace=False) if count else np.empty(0, np.int64)
    keep[candidates[candidates.new_tensor(chosen)]] = False
    return keep


def kl_cov_chosen(logprobs: Tensor, advantages: Tensor, *, share: float) -> Tensor:
    """Choose which tokens of a minibatch get a KL penalty: KL-Cov, arXiv 2505.22617, eq. 13 and 14.

    These are the ⌊share · N⌋ tokens with the largest covariance, but at least one; among equal ones, the
    earlier. Their loss becomes ℓ + γ KL(π_prox, π_θ), where the paper's code estimates the KL of a sampled
    token as |log π_prox − log π_θ|, and so does `objective.policy_loss`. This value and its gradient are 0 on
    the first minibatch of a batch. The penalty is an expectation over π_prox like ℓ, so the off-policy weight
    w multiplies both.

    Args:
        logprobs, advantages: as for `covariances`.
        share: share of the N tokens, in (0, 1]; the paper uses 2e-3 for a model of 7B and 2e-4 for one of
            32B.

    Returns:
        [N] bool.
    """
    chosen = logprobs.bool() & False
    if len(chosen):
        _, order = covariances(logprobs, advantages).sort(descending=True, stable=True)
        chosen[order[: max(1, int(share * len(chosen)))]] = True
    return chosen
