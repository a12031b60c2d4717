"""The off-policy correction: the weight π_prox/μ, by token, turn or sequence, truncated or masked.

The weight never carries a gradient. A rejected token has weight 0 and stays in the denominator of
the loss: rejecting tokens makes the step smaller, and never increases the weight of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from areal_agents.algorithms.losses.ratios import LOG_RATIO_LIMIT, Sequences, masked
from areal_agents.algorithms.parts import Part

if TYPE_CHECKING:
    from torch import Tensor

CorrectionAction = Literal["truncate", "mask"]
CorrectionLevel = Literal["token", "turn", "turn_geometric", "sequence", "geometric"]

_CAP = "Upper bound of the weight proximal/behavior."
_LEVEL = (
    "The unit of the weight proximal/behavior: a token; the product over its turn or its sequence (turn, "
    "sequence); or the geometric mean over it (turn_geometric, geometric)."
)
_VETO = "A sequence that contains a token with a weight below this value is left out."


class TruncateCorrection(Part):
    """Settings of `correct` with the action "truncate"."""

    kind: Literal["truncate"] = "truncate"
    correction_level: CorrectionLevel = Field(default="token", description=_LEVEL)
    weight_cap: float = Field(default=5.0, ge=1, description=_CAP)
    veto: float | None = Field(default=None, gt=math.exp(-LOG_RATIO_LIMIT), lt=1, description=_VETO)

    def weights(self, log_weight: Tensor, *, sequences: Sequences, turns: Sequences) -> CorrectionWeights:
        """The weight of each token."""
        return correct(
            log_weight,
            sequences,
            turns=turns,
            level=self.correction_level,
            action="truncate",
            cap=self.weight_cap,
            veto=self.veto,
        )


class MaskCorrection(Part):
    """Settings of `correct` with the action "mask"."""

    kind: Literal["mask"] = "mask"
    correction_level: CorrectionLevel = Field(default="token", description=_LEVEL)
    weight_cap: float = Field(default=5.0, gt=0, description=_CAP)
    weight_floor: float = Field(default=0.0, ge=0, description="Lower bound of the weight.")
    veto: float | None = Field(default=None, gt=math.exp(-LOG_RATIO_LIMIT), lt=1, description=_VETO)

    @model_validator(mode="after")
    def _check(self) -> MaskCorrection:
        if not self.weight_floor < 1 <= self.weight_cap:
            raise ValueError(
                f"weight_floor: {self.weight_floor} and weight_cap: {self.weight_cap} leave out the weight "
                "of an on-policy token, which is 1; give a floor below 1 and a cap of at least 1"
            )
        return self

    def weights(self, log_weight: Tensor, *, sequences: Sequences, turns: Sequences) -> CorrectionWeights:
        """The weight of each token."""
        return correct(
            log_weight,
            sequences,
            turns=turns,
            level=self.correction_level,
            action="mask",
            cap=self.weight_cap,
            floor=self.weight_floor,
            veto=self.veto,
        )


class NoCorrection(Part):
    """Weight 1 everywhere."""

    kind: Literal["none"] = "none"

    def weights(self, log_weight: Tensor, *, sequences: Sequences, turns: Sequences) -> CorrectionWeights:
        """1 for each token."""
        return uncorrected(log_weight, sequences)


Correction = Annotated[TruncateCorrection | MaskCorrection | NoCorrection, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, eq=False)
class CorrectionWeights:
    """The weight of each token, and whether it was capped, rejected or vetoed.

    Attributes:
        weight: [N], 0 where rejected.
        raw: [N], the weight at the requested level before cap, mask and veto.
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
    turns: Sequences | None = None,
    level: CorrectionLevel = "token",
    action: CorrectionAction = "truncate",
    cap: float = 5.0,
    floor: float = 0.0,
    veto: float | None = None,
) -> CorrectionWeights:
    """Weights from log w_t = log π_prox − log μ of each token.

        token: w_t      turn, sequence: Π_s w_s      turn_geometric, geometric: (Π_s w_s)^(1/n)
        truncate: min(w, cap)                        mask: w if floor ≤ w ≤ cap, else 0

    The products are over the token's turn, or over its root-to-leaf path. Truncation by token is TIS (arXiv
    2505.24298 caps this weight; named so in https://fengyao.notion.site/off-policy-rl); masking without a
    floor is MIS, with one IcePop (arXiv 2510.18855); a weight per turn is that of arXiv 2511.20718. A product
    is clamped to e^±20 like a single ratio.

    Args:
        log_weight: [N], from `ratios.log_ratio`.
        sequences, turns: grouping of the same N tokens; a token that does not count there is in no product.
            By default each sequence is one turn.
        cap: upper bound, > 0.
        floor: lower bound of a mask.
        veto: a sequence with a token weight below it is rejected whole, at every level.

    Raises:
        ValueError: a floor is given with truncate or is not below the cap, or no clamped weight can fall
            below the veto.
    """
    if floor and (action == "truncate" or floor >= cap):
        raise ValueError(
            "floor must be 0 with action truncate, and below cap with action mask, got floor "
            f"{floor}, action {action} and cap {cap}"
        )
    if veto is not None and not math.exp(-LOG_RATIO_LIMIT) < veto:
        raise ValueError(
            f"veto must be above e^-{LOG_RATIO_LIMIT:g}, the smallest weight after clamping, got {veto}"
        )
    log_weight = log_weight.detach()
    raw = _at_level(log_weight, sequences, sequences if turns is None else turns, level).exp()
    nothing = sequences.keep & False
    if action == "truncate":
        weight, capped, rejected = raw.clamp(max=cap), raw > cap, nothing
    else:
        weight, capped, rejected = raw, nothing, (raw < floor) | (raw > cap)
    vetoed = sequences.lengths < 0
    if veto is not None:
        vetoed = sequences.any(log_weight < math.log(veto))
        rejected = rejected | sequences.spread(vetoed)
    return CorrectionWeights(masked(weight, ~rejected), raw, capped & ~rejected, rejected, vetoed)


def uncorrected(log_weight: Tensor, sequences: Sequences) -> CorrectionWeights:
    """Weight 1 everywhere, for losses without an off-policy correction."""
    nothing = sequences.keep & False
    ones = log_weight.new_ones(log_weight.shape)
    return CorrectionWeights(ones, ones, nothing, nothing, sequences.lengths < 0)


def _at_level(log_weight: Tensor, sequences: Sequences, turns: Sequences, level: CorrectionLevel) -> Tensor:
    if level == "token":
        return log_weight
    over = turns if level in ("turn", "turn_geometric") else sequences
    combined = over.sums(log_weight) if level in ("turn", "sequence") else over.means(log_weight)
    return over.spread(combined).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
