"""Which tokens of a minibatch keep their gradient, beside what the loss itself clips.

The choice is made once for all tokens of a minibatch, on every rank alike, before the first micro-batch, so
it does not depend on how the minibatch was cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from areal_agents.algorithms.losses.ratios import log_ratio
from areal_agents.algorithms.parts import Part

if TYPE_CHECKING:
    from torch import Tensor


class NoTrustRegion(Part):
    """Every token keeps its gradient."""

    kind: Literal["none"] = "none"


class M2po(Part):
    """Settings of `m2po_keep`."""

    kind: Literal["m2po"] = "m2po"
    m2po_threshold: float = Field(
        default=0.04, gt=0, description="Mean squared log-ratio that M2PO leaves in a batch."
    )

    def keep(self, behavior: Tensor, proximal: Tensor, advantages: Tensor) -> Tensor:
        """[N] bool, see `m2po_keep`."""
        return m2po_keep(behavior, proximal, advantages, threshold=self.m2po_threshold)


TrustRegion = Annotated[NoTrustRegion | M2po, Field(discriminator="kind")]


def m2po_keep(behavior: Tensor, proximal: Tensor, advantages: Tensor, *, threshold: float) -> Tensor:
    """Which tokens of a minibatch keep their gradient: M2PO, arXiv 2510.01161, algorithm 1.

        T = {t: A_t > 0 and r_t > 1, or A_t < 0 and r_t < 1},  r = π_prox/μ
        while mean_{t ∈ T} (log r_t)² > threshold: take the largest out of T, and out of the loss

    Only T, the tokens that a clip could act on, is measured and cut; all others are kept. Of equal
    values the later token goes first. What is left out stays in the denominator of the loss, as in
    the paper (footnote 2). The paper takes r with the weights being trained; those of the batch's
    beginning stand in for them, which is the same on the first minibatch.

    Args:
        behavior, proximal, advantages: [N], the trained tokens of one optimizer step, over all ranks.
        threshold: in squared nats; the paper uses 0.04.

    Returns:
        [N] bool.

    Raises:
        ValueError: a threshold that is not positive.
    """
    if not threshold > 0:
        raise ValueError(f"the M2PO threshold must be positive, got {threshold}")
    moved = log_ratio(proximal, behavior).double()
    constrained = (moved * advantages.sign() > 0).nonzero().squeeze(1)
    ascending, order = moved[constrained].square().sort(stable=True)
    counts = constrained.new_ones(len(ascending)).cumsum(0)
    # the mean of the n smallest grows with n, so those within the bound come first
    within = ascending.cumsum(0) / counts <= threshold
    keep = moved.bool() | True
    keep[constrained[order[~within]]] = False
    return keep
