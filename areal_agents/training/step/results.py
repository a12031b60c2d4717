"""Results of training a batch, from which the metrics are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from areal_agents.algorithms.losses.dpo import DpoCoefficients
from areal_agents.algorithms.losses.statistics import LossStatistics
from areal_agents.training.step.learner import Learner
from areal_agents.training.step.proximal_pass import Scores
from areal_agents.training.step.recording import TrainedTokens


@dataclass(frozen=True, slots=True)
class CriticResult:
    """The result of training the critic on a batch.

    Attributes:
        loss: mean over the minibatches of the value loss.
        clipped: share of the trained tokens whose value was clipped.
        explained_variance: 1 − Var(target − value)/Var(target) over the batch's trained tokens, with the
            values computed before the first optimizer step; nan if all targets are equal.
        grad_norm, skipped_steps: as in StepResult.
    """

    loss: float
    clipped: float
    explained_variance: float
    grad_norm: float
    skipped_steps: int


@dataclass(frozen=True, slots=True)
class DpoResult:
    """The result of DPO on a batch: means over the minibatches, each under the weights before its step.

    Attributes:
        loss: −log σ(margin); accuracy: share of pairs with a positive margin.
        margin: β [log π/π_ref (chosen) − log π/π_ref (rejected)].
    """

    loss: float
    accuracy: float
    margin: float


@dataclass(frozen=True, slots=True)
class ObservationResult:
    """The result of training on observations.

    Attributes:
        loss: mean cross entropy in nats, each token under the weights before its minibatch's step; nan if
            there is no token.
        tokens: number of observation tokens, each counted once.
    """

    loss: float
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of training a batch, summed over its minibatches and ranks.

    Attributes:
        statistics: the statistics of the losses.
        grad_norm: mean over the minibatches of the gradient norm before clipping, without skipped steps.
        skipped_steps: optimizer steps skipped because the gradient was not finite.
        microbatches: number of forward and backward passes, over all ranks.
        model_tokens: tokens that went through the model; sample_tokens: what they would have been
            without shared prefixes.
        critic, observation, dpo: the results of the critic, of the observations and of DPO's pairs; None if
            the algorithm has none.
        packing_fill: model tokens / token capacity of the micro-batches that train something.
        rank_imbalance: FLOPs of the busiest rank / mean over the ranks − 1.
        rank_tokens: model tokens by data rank.
        flops: FLOPs of all passes over all ranks, without what activation checkpointing recomputes.
        seconds: wall-clock time on this rank by part of the step.
        device_memory_peak: the most bytes that a rank had allocated on its GPU; None on a CPU.
        tokens: the tokens that this rank trained; None unless they are recorded.
    """

    statistics: LossStatistics
    grad_norm: float
    skipped_steps: int
    microbatches: int
    model_tokens: int
    sample_tokens: int
    critic: CriticResult | None = None
    observation: ObservationResult | None = None
    dpo: DpoResult | None = None
    packing_fill: float = math.nan
    rank_imbalance: float = math.nan
    rank_tokens: tuple[int, ...] = ()
    flops: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    device_memory_peak: int | None = None
    tokens: TrainedTokens | None = None

    @classmethod
    def nothing(cls) -> StepResult:
        """The result of a batch without samples."""
        return cls(LossStatistics.zero(), math.nan, 0, 0, 0, 0)


def critic_result(learner: Learner, sums: Tensor, scores: Scores, trained: Tensor) -> CriticResult:
    """Compute the critic's result.

    Args:
        trained: [M] bool, the tokens that are trained.
        sums: [2] sums over minibatches and ranks: the value loss and the number of clipped tokens.
    """
    assert scores.values is not None and scores.value_targets is not None
    loss, clipped = sums.tolist()
    values, targets = scores.values[trained], scores.value_targets[trained]
    return CriticResult(
        loss=loss / len(learner.norms),
        clipped=clipped / len(values),
        explained_variance=explained_variance(values, targets),
        grad_norm=learner.grad_norm,
        skipped_steps=learner.skipped_steps,
    )


def dpo_result(coefficients: Sequence[DpoCoefficients]) -> DpoResult:
    """Means over the minibatches."""
    count = len(coefficients)
    return DpoResult(
        loss=sum(c.loss for c in coefficients) / count,
        accuracy=sum(c.accuracy for c in coefficients) / count,
        margin=sum(c.margin for c in coefficients) / count,
    )


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """1 − Var(targets − values)/Var(targets) of [M]; nan if all targets are equal."""
    spread = float(targets.double().var(correction=0))
    if not spread > 0:
        return math.nan
    return 1 - float((targets - values).double().var(correction=0)) / spread
