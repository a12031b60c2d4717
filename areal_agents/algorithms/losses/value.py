"""The critic's loss. Micro-batches and ranks each contribute a share, as for the policy's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_agents.algorithms.losses.ratios import widen


def value_loss(
    values: Tensor, *, old_values: Tensor, targets: Tensor, loss_weights: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Squared error to the returns, clipped around the values before the batch.

        L = Σ_t c_t · ½ max((v_t − R_t)², (clip(v_t, v_old ± clip) − R_t)²)

    The clipped form is that of PPO's published code, described in arXiv 2005.12729, section 3; None
    gives the plain ½ (v − R)².

    Args:
        values: [N] of the critic being trained; the only input with a gradient.
        old_values, targets: [N], V before the batch and the returns R.
        loss_weights: [N] c_t, see `normalization.loss_weights`.
        clip: largest distance from the old value at which a value still has a gradient towards its target.

    Returns:
        The loss, a scalar, and the number of tokens where the clipped error was the larger (float64).

    Raises:
        ValueError: the shapes differ, or the clip is not positive.
    """
    shapes = {tuple(t.shape) for t in (values, old_values, targets, loss_weights)}
    if len(shapes) != 1:
        raise ValueError(f"all tensors must have one shape, got {sorted(shapes)}")
    if clip is not None and not clip > 0:
        raise ValueError(f"the value clip must be positive, got {clip}")
    values = widen(values)
    error = (values - targets.detach()).square()
    if clip is None:
        return (loss_weights * error).sum() / 2, error.new_zeros((), dtype=torch.float64)
    old = old_values.detach()
    near = torch.minimum(torch.maximum(values, old - clip), old + clip)
    clipped = (near - targets.detach()).square()
    loss = (loss_weights * torch.maximum(error, clipped)).sum() / 2
    return loss, (clipped > error).sum().double()
