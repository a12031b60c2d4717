"""The off-policy correction: the weight π_prox/μ, by token or sequence, truncated or masked.

The weight never carries a gradient. A rejected token has weight 0 and stays in the denominator of
the loss: what is rejected makes the step smaller, and what is left never counts for more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_agents.algorithms.config import CorrectionAction, CorrectionLevel
from areal_agents.algorithms.losses.ratios import Sequences
from areal_agents.algorithms.rules import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """The weight of each token, and what was done to it.

    Attributes:
        weight: [N], 0 where rejected.
        raw: [N], the weight at the asked level before cap, mask and veto.
        capped: [N] bool, raw above the cap of a truncation.
        rejected: [N] bool, outside the bounds of a mask, or in a vetoed sequence.
        vetoed: [S] bool.
    """

    weight: Tensor
    raw: Tensor
    capped: Tensor
    rejected: Tensor
    vetoed: Tensor


def correct(
    log_weight: Tensor,
    sequences: Sequences,
    *,
    level: CorrectionLevel = "token",
    action: CorrectionAction = "truncate",
    cap: float = 5.0,
    floor: float = 0.0,
    veto: float | None = None,
) -> Correction:
    """Weights from log w_t = log π_prox − log μ of each token.

        token: w_t      sequence: Π_s w_s      geometric: (Π_s w_s)^(1/n), over the token's sequence
        truncate: min(w, cap)                  mask: w if floor ≤ w ≤ cap, else 0

    Truncation by token is TIS (arXiv 2505.24298 caps this weight; named so in
    https://fengyao.notion.site/off-policy-rl); masking without a floor is MIS, with one IcePop
    (arXiv 2510.18855). A product is clamped to e^±20 like a single ratio.

    Args:
        log_weight: [N], from `ratios.log_ratio`.
        sequences: of the same N tokens; a token that does not count there is in no product.
        cap: upper bound, > 0.
        floor: lower bound of a mask.
        veto: a sequence with a token weight below it is rejected whole, at every level.

    Raises:
        ValueError: a floor with truncate or not below the cap, or a veto that no clamped weight can meet.
    """
    if floor and (action == "truncate" or floor >= cap):
        raise ValueError(
            f"a floor needs the action mask and must lie below the cap, got {floor} with {action}, cap {cap}"
        )
    if veto is not None and not math.exp(-LOG_RATIO_LIMIT) < veto:
        raise ValueError(f"a veto must be above e^-{LOG_RATIO_LIMIT:g}, where log-ratios end, got {veto}")
    log_weight = log_weight.detach()
    raw = _at_level(log_weight, sequences, level).exp()
    nothing = torch.zeros_like(sequences.keep)
    if action == "truncate":
        weight, capped, rejected = raw.clamp(max=cap), raw > cap, nothing
    else:
        weight, capped, rejected = raw, nothing, (raw < floor) | (raw > cap)
    vetoed = torch.zeros_like(sequences.lengths, dtype=torch.bool)
    if veto is not None:
        vetoed = sequences.any(log_weight < math.log(veto))
        rejected = rejected | sequences.spread(vetoed)
    weight = torch.where(rejected, torch.zeros_like(weight), weight)
    return Correction(weight, raw, capped & ~rejected, rejected, vetoed)


def uncorrected(log_weight: Tensor, sequences: Sequences) -> Correction:
    """Weight 1 everywhere: what is learned from recorded episodes is not weighted by who wrote it."""
    nothing = torch.zeros_like(sequences.keep)
    ones = torch.ones_like(log_weight.detach())
    return Correction(ones, ones, nothing, nothing, torch.zeros_like(sequences.lengths, dtype=torch.bool))


def _at_level(log_weight: Tensor, sequences: Sequences, level: CorrectionLevel) -> Tensor:
    if level == "token":
        return log_weight
    combined = sequences.sums(log_weight) if level == "sequence" else sequences.means(log_weight)
    return sequences.spread(combined).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
