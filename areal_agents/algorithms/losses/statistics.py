"""Statistics of a loss: sums and maxima that can be combined over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_agents.algorithms.losses.correction import CorrectionWeights
from areal_agents.algorithms.losses.loss import TokenLosses
from areal_agents.algorithms.losses.ratios import Sequences

# Positions in the sequence at which engine and trainer are compared apart: longer contexts sum more terms.
POSITIONS = {"0-255": 0, "256-1023": 256, "1024-4095": 1024, "4096-16383": 4096, "16384+": 16_384}

SUMS = (
    "tokens",
    "sequences",
    "dropped_tokens",
    "loss",
    "clipped_low",
    "clipped_high",
    "dual_clipped",
    "ratio",
    "kl_k1",
    "kl_k3",
    "kl_reference",
    "weight",
    "weight_squared",
    "weight_raw",
    "weight_capped",
    "rejected_tokens",
    "rejected_sequences",
    "vetoed_sequences",
    "abs_diff",
    "on_policy_tokens",
    "on_policy_abs_diff",
    "entropy",
    "replayed_tokens",
    "replayed_abs_diff",
    "rerouted_tokens",
    "rerouted_layers",
    *(f"tokens_at_{name}" for name in POSITIONS),
    *(f"abs_diff_at_{name}" for name in POSITIONS),
)
MAXIMA = ("abs_diff_max", "on_policy_abs_diff_max", "abs_log_ratio_max", "weight_raw_max")


@dataclass(frozen=True, slots=True, eq=False)
class LossStatistics:
    """Statistics that add up over micro-batches and ranks.

    Every sum is over the trained tokens that a trust region kept, rejected ones included. Divided by `tokens`
    or, for sums over sequences, by `sequences`, they are means; the effective sample size is weight² /
    (weight_squared · tokens). A sequence that context parallelism spreads over ranks counts once on each.

    Attributes:
        sums: [len(SUMS)] float64, in the order of `SUMS`: kept tokens, sequences with one, and tokens
            not kept; the weighted policy loss before normalisation; tokens whose ratio was clipped
            below and above, and by the dual clip; the ratio current/proximal; k1 and k3 estimates of
            KL(behavior, current); the configured estimate of KL(current, reference); the weight w as
            applied (0 where rejected), w², w before cap and mask, and how often it was capped; tokens
            rejected, sequences of which every token was, and sequences vetoed; |proximal − behavior|
            logprob, and the same on tokens of the trainer's own version (there it is the numerical
            difference between engine and trainer); entropy; tokens of the trainer's own version whose
            experts the engine recorded, the difference on them, those of them for which the trainer would
            choose other experts in any layer, and the sum of their shares of layers; and for each range of
            `POSITIONS` the tokens of the own version there, and the difference on them.
        maxima: [len(MAXIMA)] float64, in the order of `MAXIMA`.
    """

    sums: Tensor
    maxima: Tensor

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> LossStatistics:
        """Statistics of no tokens."""
        return cls(
            torch.zeros(len(SUMS), dtype=torch.float64, device=device),
            torch.zeros(len(MAXIMA), dtype=torch.float64, device=device),
        )

    def __add__(self, other: LossStatistics) -> LossStatistics:
        return LossStatistics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def as_dict(self) -> dict[str, float]:
        """Every sum and maximum by name."""
        values = [*self.sums.tolist(), *self.maxima.tolist()]
        return dict(zip((*SUMS, *MAXIMA), values, strict=True))


def measure(
    loss: Tensor,
    log_ratio: Tensor,
    log_weight: Tensor,
    correction: CorrectionWeights,
    policy: TokenLosses,
    sequences: Sequences,
    *,
    trained: Tensor,
    kl: Tensor | None = None,
    entropy: Tensor | None = None,
    on_policy: Tensor | None = None,
    positions: Tensor | None = None,
    replayed: Tensor | None = None,
    rerouted: Tensor | None = None,
) -> LossStatistics:
    """Compute the statistics of N tokens from the parts of their loss.

    Args:
        loss: [N], the weighted policy loss.
        log_ratio, log_weight: [N], log current/proximal and log proximal/behavior.
        trained: [N] bool, kept tokens that carry a gradient; the others are measured elsewhere.
        kl: [N] estimates of KL(current, reference); None counts as 0.
        entropy: [N]; None counts as 0. on_policy: [N] bool; None means all tokens.
        positions: [N] int64, where each token is in its sequence; None counts as 0.
        replayed: [N] bool, tokens whose experts the engine recorded; None means no token.
        rerouted: [N], the share of layers in which the trainer would choose other experts; None counts as 0.
    """
    own = trained if on_policy is None else trained & on_policy
    rejected = correction.rejected & trained
    counts = sequences.sums(trained.long())
    present = counts > 0
    wholly_rejected = present & (sequences.sums(rejected.long()) == counts)
    current_over_behavior = log_ratio + log_weight
    nothing = torch.zeros_like(log_weight)

    def total(values: Tensor | None, where: Tensor = trained) -> Tensor:
        values = nothing if values is None else values
        return torch.where(where, values.double(), 0.0).sum()

    def largest(values: Tensor, where: Tensor = trained) -> Tensor:
        inside = torch.where(where, values.double(), 0.0)
        return torch.cat([inside, inside.new_zeros(1)]).amax()

    sums = {
        "tokens": trained.sum().double(),
        "sequences": present.sum().double(),
        "dropped_tokens": (~sequences.keep).sum().double(),
        "loss": total(loss),
        "clipped_low": total(policy.clipped_low),
        "clipped_high": total(policy.clipped_high),
        "dual_clipped": total(policy.dual_clipped),
        "ratio": total(log_ratio.exp()),
        "kl_k1": -total(current_over_behavior),
        "kl_k3": total(torch.expm1(current_over_behavior) - current_over_behavior),
        "kl_reference": total(kl),
        "weight": total(correction.weight),
        "weight_squared": total(correction.weight**2),
        "weight_raw": total(correction.raw),
        "weight_capped": total(correction.capped),
        "rejected_tokens": total(rejected),
        "rejected_sequences": wholly_rejected.sum().double(),
        "vetoed_sequences": (correction.vetoed & present).sum().double(),
        "abs_diff": total(log_weight.abs()),
        "on_policy_tokens": total(own),
        "on_policy_abs_diff": total(log_weight.abs(), own),
        "entropy": total(entropy),
        **_by_position(log_weight.abs(), own, positions),
    }
    by_engine = torch.zeros_like(own) if replayed is None else own & replayed
    sums |= {
        "replayed_tokens": total(by_engine),
        "replayed_abs_diff": total(log_weight.abs(), by_engine),
        "rerouted_tokens": total(None if rerouted is None else rerouted > 0, by_engine),
        "rerouted_layers": total(rerouted, by_engine),
    }
    maxima = {
        "abs_diff_max": largest(log_weight.abs()),
        "on_policy_abs_diff_max": largest(log_weight.abs(), own),
        "abs_log_ratio_max": largest(log_ratio.abs()),
        "weight_raw_max": largest(correction.raw),
    }
    return LossStatistics(
        torch.stack([sums[name] for name in SUMS]), torch.stack([maxima[name] for name in MAXIMA])
    )


def _by_position(difference: Tensor, own: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
    """Number of the own tokens, and sum of their differences, in each range of `POSITIONS`."""
    starts = torch.tensor([*POSITIONS.values()][1:], device=own.device)
    places = torch.zeros_like(own, dtype=torch.long)
    if positions is not None:
        places = torch.bucketize(positions, starts, right=True)
    counts = difference.new_zeros(len(POSITIONS), dtype=torch.float64).index_add(0, places, own.double())
    inside = torch.where(own, difference.double(), 0.0)
    sums = torch.zeros_like(counts).index_add(0, places, inside)
    named = {f"tokens_at_{name}": count for name, count in zip(POSITIONS, counts, strict=True)}
    return named | {f"abs_diff_at_{name}": total for name, total in zip(POSITIONS, sums, strict=True)}
