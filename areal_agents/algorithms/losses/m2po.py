"""M2PO's trust region: the tokens that moved furthest are left out, until the rest moved little enough.

The bound is on a mean over a whole minibatch, so the mask is found once for all its tokens, on
every rank alike, before the first micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_agents.algorithms.losses.ratios import log_ratio


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
    constrained = torch.nonzero(moved * advantages.sign() > 0).squeeze(1)
    ascending, order = moved[constrained].square().sort(stable=True)
    counts = torch.arange(1, len(ascending) + 1, device=ascending.device)
    # the mean of the n smallest grows with n, so those within the bound come first
    within = ascending.cumsum(0) / counts <= threshold
    keep = torch.ones_like(moved, dtype=torch.bool)
    keep[constrained[order[~within]]] = False
    return keep
