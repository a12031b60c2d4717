"""Estimates of KL(π, reference) from the sampled tokens, one per token, added to the reward or to the loss.

With d = log π_ref − log π (J. Schulman, http://joschu.net/blog/kl-approx.html):

    k1 = −d        k2 = d²/2        k3 = e^d − 1 − d

All three estimate the same number; k1 is unbiased with the largest variance, k2 is biased, k3 is
unbiased and never negative. Their gradients differ, so it matters where the estimate is added. Over tokens
that π itself sampled, with s = ∇ log π:

    in the reward (no gradient through it): k1 gives E[(log π − log π_ref) s], the gradient of
        KL(π, ref), as intended; k2 and k3 give gradients of other quantities.
    in the loss (differentiated): k2 gives (log π − log π_ref) s, the same gradient; k3 gives
        (1 − π_ref/π) s, which is on average the gradient of KL(ref, π), the other direction; k1
        gives s alone, which is zero on average: a penalty that only adds noise.

So k1 belongs in the reward, k2 or k3 in the loss; arXiv 2510.01555 derives this. A term of the loss
is not weighted by π_θ/μ, as in GRPO (arXiv 2402.03300, eq. 4): over stale tokens all this holds only
as far as μ is near π.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from areal_agents.algorithms.losses.ratios import log_ratio
from areal_agents.algorithms.parts import Part

if TYPE_CHECKING:
    from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

_COEFFICIENT = "Weight of the KL to the reference policy."
_ESTIMATOR = "The estimate of that KL per token."


class NoKl(Part):
    """No KL to a reference policy is added."""

    kind: Literal["none"] = "none"


class KlInReward(Part):
    """A KL subtracted from the reward of each token."""

    kind: Literal["reward"] = "reward"
    kl_estimator: KlEstimator = Field(default="k1", description=_ESTIMATOR)
    kl_coefficient: float = Field(gt=0, description=_COEFFICIENT)


class KlInLoss(Part):
    """A KL added to the loss of each token."""

    kind: Literal["loss"] = "loss"
    kl_estimator: Literal["k2", "k3"] = Field(default="k3", description=_ESTIMATOR)
    kl_coefficient: float = Field(gt=0, description=_COEFFICIENT)

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _refuse_k1(cls, value: object) -> object:
        if value == "k1":
            raise ValueError(
                "the gradient of k1 in the loss is 0 on average, so it only adds noise; use k2 or k3, or "
                "kl_in: reward"
            )
        return value


KlPlace = Annotated[NoKl | KlInReward | KlInLoss, Field(discriminator="kind")]


def kl_estimate(
    logprobs: Tensor, reference: Tensor, *, estimator: KlEstimator, keep: Tensor | None = None
) -> Tensor:
    """Return [N] estimates of KL(π, reference), differentiable in `logprobs`; log-ratios are clamped to ±20.

    Args:
        logprobs: [N] of the policy: the current one for a term of the loss, the proximal one for the reward.
        reference: [N] of the frozen reference policy (detached here).
        keep: [N] bool; 0 where it is False.
    """
    d = log_ratio(reference.detach(), logprobs, keep=keep)
    if estimator == "k1":
        return -d
    return d.square() / 2 if estimator == "k2" else d.expm1() - d
