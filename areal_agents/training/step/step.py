"""Trains on one batch: runs the passes without gradients, then K optimizer steps of policy and critic.

The coefficients of a loss are computed over its whole minibatch, so the gradient does not depend on how the
batch is cut into micro-batches or on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.estimators import GaeEstimator
from areal_agents.algorithms.losses.dpo import DpoCoefficients, DpoLoss
from areal_agents.algorithms.losses.statistics import LossStatistics
from areal_agents.algorithms.samples import TrainingData
from areal_agents.training.config import Reshard
from areal_agents.training.distributed import Ranks
from areal_agents.training.metrics.clock import Clock
from areal_agents.training.metrics.device_memory import peak_memory, start_peak
from areal_agents.training.model.critic import CriticState
from areal_agents.training.model.model import Policy
from areal_agents.training.model.reference import Reference
from areal_agents.training.model.sharding import drop_gradients
from areal_agents.training.step.learner import Learner
from areal_agents.training.step.losses import pair_pass, policy_share, value_share
from areal_agents.training.step.plan import BatchPlan, Minibatch, lay_out
from areal_agents.training.step.proximal_pass import Scores, gathered, passes, release, score_batch
from areal_agents.training.step.recording import TokenRecorder
from areal_agents.training.step.results import (
    CriticResult,
    DpoResult,
    ObservationResult,
    StepResult,
    critic_result,
    dpo_result,
)
from areal_agents.training.step.teacher import Teacher

__all__ = ["CriticResult", "DpoResult", "StepOptions", "StepResult", "Stopped", "train_batch"]


class Stopped(Exception):
    """A stop was requested before the first optimizer step of a batch; the weights are unchanged."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The options of a step that do not depend on the algorithm; the names are those of the configuration.

    With `downweight_stale` (`rollout.on_stale: downweight`) older tokens count less; `gradients_on_host`
    (`trainer.offload: all`) says that FSDP keeps gradients in host memory; `reshard` is that of the models'
    options; with `records_tokens` the result has the terms of each trained token.
    """

    microbatch_tokens: int
    share_prefixes: bool
    grad_clip: float
    downweight_stale: bool = False
    gradients_on_host: bool = False
    reshard: Reshard = "block"
    records_tokens: bool = False


def train_batch(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    data: TrainingData | None,
    algorithm: AlgorithmConfig,
    options: StepOptions,
    *,
    ranks: Ranks,
    version: int,
    seed: int,
    critic: CriticState | None = None,
    reference: Reference | None = None,
    teacher: Teacher | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Train on a batch. Collective.

    Args:
        data: the batch, on the first rank, which sends each rank its micro-batches; None on the others.
        version: the version of the current weights.
        seed: seed of the order of the minibatches and of a trust region's random choices.
        critic, reference, teacher: given if and only if the algorithm needs them.
        stopping: called before every micro-batch of every pass; all ranks stop as soon as it returns true on
            one of them.

    Raises:
        Stopped: `stopping()` became true before the first optimizer step; the weights are unchanged.
        TrainingError: a sample does not fit a micro-batch, or the critic's values are not finite.
        TeacherError: the teacher's engine cannot be used; the weights are unchanged.
        ValueError: there are no samples, or a critic, reference or teacher is missing or given without need.

    No gradient and no gathered weight of a trained model is left, however the batch ends.
    """
    if (data is not None) != ranks.is_first:
        raise ValueError("expected the batch on the first rank, and on no other rank")
    _check(algorithm, ranks, critic, reference, teacher)
    batch = _BatchState(
        policy, optimizer, critic, teacher, algorithm, ranks, version, stopping, options,
        TokenRecorder() if options.records_tokens else None,
    )  # fmt: skip
    with batch.clock.part("pack"):
        plan = lay_out(
            data,
            algorithm,
            ranks=ranks,
            shape=policy.shape,
            token_budget=options.microbatch_tokens,
            share_prefixes=options.share_prefixes,
            seed=seed,
            downweight_at=version if options.downweight_stale else None,
            names_turns=options.records_tokens,
        )
    try:
        scores = score_batch(
            plan,
            policy,
            algorithm,
            critic=critic.critic if critic else None,
            reference=reference,
            teacher=teacher,
            ranks=ranks,
            clock=batch.clock,
            check_stop=batch.check_stop,
            stopping=stopping,
            seed=seed,
        )
        for place, minibatch in enumerate(plan.minibatches):
            advantages = batch.advantages(plan, minibatch, scores)
            with batch.clock.part("gradient"):
                batch.accumulate(minibatch, scores, advantages, place=place)
            with batch.clock.part("optimizer"):
                for learner in batch.learners:
                    learner.step(options.grad_clip)
    finally:
        for learner in batch.learners:
            release(learner.module)  # first: the parameters of a gathered module have no shard's gradient
            drop_gradients(learner.module)
        if reference is not None:
            release(reference)
    return batch.result(plan, scores)


def _check(
    algorithm: AlgorithmConfig,
    ranks: Ranks,
    critic: CriticState | None,
    reference: Reference | None,
    teacher: Teacher | None,
) -> None:
    for name, needed, given in (
        ("critic", algorithm.needs_critic, critic is not None),
        ("reference", algorithm.needs_reference, reference is not None),
        ("teacher", algorithm.teacher is not None, teacher is not None),
    ):
        if needed != given:
            has, got = ("needs a" if needed else "has no"), ("one" if given else "none")
            raise ValueError(f"preset {algorithm.preset} {has} {name}, got {got}")
    whole = algorithm.looks_at_sequences or algorithm.looks_at_turns
    assert ranks.context_count == 1 or not whole, (
        "the loss needs whole sequences, but context_parallel splits them over several ranks"
    )


@dataclass(eq=False)
class _BatchState:
    """The state of a batch in training on one rank: the models and the results so far."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: CriticState | None
    teacher: Teacher | None
    algorithm: AlgorithmConfig
    ranks: Ranks
    version: int
    stopping: Callable[[], bool]
    options: StepOptions
    recorder: TokenRecorder | None
    pairs: list[DpoCoefficients] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.ranks.device
        start_peak(device)
        self.clock = Clock(device)
        trained: list[tuple[nn.Module, torch.optim.Optimizer]] = [(self.policy, self.optimizer)]
        if self.critic is not None:
            trained.append((self.critic.critic, self.critic.optimizer))
        self.learners = [
            Learner(
                module,
                optimizer,
                self.ranks.shards,
                on_host=self.options.gradients_on_host,
                reshard=self.options.reshard,
            )
            for module, optimizer in trained
        ]
        self.statistics = LossStatistics.zero(device)
        self.value_sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.observation_sums = torch.zeros(2, dtype=torch.float64, device=device)

    def check_stop(self) -> None:
        """Raise Stopped on all ranks if any of them should stop.

        After its first optimizer step a batch is always completed, because a run cannot be resumed within a
        batch.
        """
        if not self.learners[0].norms and self.ranks.any(self.stopping()):
            raise Stopped("stopped before the first optimizer step of a batch")

    def advantages(self, plan: BatchPlan, minibatch: Minibatch, scores: Scores) -> Tensor:
        """Return the advantages [M], or for DPO the coefficients under the current weights."""
        if not isinstance(self.algorithm.policy_loss, DpoLoss):
            return scores.advantages
        with self.clock.part("pairs"):
            advantages, coefficients = pair_pass(
                self.policy,
                plan,
                minibatch,
                scores,
                beta=self.algorithm.policy_loss.dpo_beta,
                ranks=self.ranks,
                check_stop=self.check_stop,
            )
        self.pairs.append(coefficients)
        return advantages

    def accumulate(self, minibatch: Minibatch, scores: Scores, advantages: Tensor, *, place: int) -> None:
        """Accumulate the gradients of a minibatch; `place` is its number in the batch."""
        scale = self.ranks.count  # FSDP averages over the ranks, but the loss is a sum
        for index, work in enumerate(minibatch.work):
            self.check_stop()
            last = index == len(minibatch.work) - 1
            loss, statistics, observed, terms = policy_share(
                self.policy,
                work,
                scores,
                advantages,
                self.algorithm,
                version=self.version,
                teacher=self.teacher,
            )
            self.learners[0].backward(loss * scale, last=last)
            self.statistics += statistics
            if self.recorder is not None:
                self.recorder.add(work, terms, scores, minibatch=place)
            if observed is not None:
                self.observation_sums += observed
            if self.critic is not None:
                assert isinstance(self.algorithm.estimator, GaeEstimator)
                loss, sums = value_share(self.critic.critic, work, scores, self.algorithm.estimator)
                self.learners[1].backward(loss * scale, last=last)
                self.value_sums += sums

    def result(self, plan: BatchPlan, scores: Scores) -> StepResult:
        """Return the result of the batch, over all ranks. Collective."""
        policy, load = self.learners[0], plan.load
        critic = observation = None
        if self.critic is not None:
            trained = gathered(plan, "trained", self.ranks).bool()
            critic = critic_result(self.learners[1], self.ranks.sum(self.value_sums), scores, trained)
        if self.algorithm.observation_coefficient:
            entropies, tokens = self.ranks.sum(self.observation_sums).tolist()
            observation = ObservationResult(entropies / tokens if tokens else math.nan, int(tokens))
        return StepResult(
            statistics=LossStatistics(
                self.ranks.sum(self.statistics.sums), self.ranks.max(self.statistics.maxima)
            ),
            grad_norm=policy.grad_norm,
            skipped_steps=policy.skipped_steps,
            microbatches=load.microbatches,
            model_tokens=load.model_tokens,
            sample_tokens=load.sample_tokens,
            critic=critic,
            observation=observation,
            dpo=dpo_result(self.pairs) if self.pairs else None,
            packing_fill=load.fill,
            rank_imbalance=load.imbalance,
            rank_tokens=load.rank_tokens,
            flops=load.forward_flops * passes(self.algorithm),
            seconds=dict(self.clock.seconds),
            device_memory_peak=peak_memory(self.ranks),
            tokens=self.recorder.tokens() if self.recorder is not None else None,
        )
