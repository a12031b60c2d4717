"""Passes without gradients over a whole batch, before its first optimizer step, and their results.

Proximal and reference logprobs and values are computed only where the algorithm needs them. Every result is
complete and equal on every rank. What needs the samples (credit by token, the choices of a trust region) is
computed on the first rank, which has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.tokens import token_advantages
from areal_agents.algorithms.losses.dpo import DpoLoss
from areal_agents.algorithms.losses.kl import KlInReward, kl_estimate
from areal_agents.algorithms.losses.trust_region import NoTrustRegion
from areal_agents.algorithms.packing.flops import TRAINING
from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.core.sample import TrainingSample
from areal_agents.training.distributed import Ranks
from areal_agents.training.metrics.clock import Clock
from areal_agents.training.model.critic import Critic
from areal_agents.training.model.model import Policy
from areal_agents.training.model.reference import BaseOfAdapter, Reference
from areal_agents.training.step.divergence import TopTargets
from areal_agents.training.step.plan import BatchPlan, PlannedMicroBatch, by_sample
from areal_agents.training.step.teacher import EngineTeacher, HeldTeacher, SelfTeacher, Teacher


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The scores of the M scored tokens of a batch before the first optimizer step.

    Attributes:
        advantages: [M] float32.
        proximal: [M] proximal logprobs; None if the current logprobs are used, as with a single minibatch.
        reference: [M] logprobs of the reference policy.
        values, value_targets: [M], the critic's values and their targets.
        keep: [M] bool, the tokens that a trust region keeps; None keeps all.
        penalty: [M] float32, the penalty of a trust region, see `TokenChoice`; None: no penalty.
        teacher: [M, k] the most likely tokens of a teacher queried before the step; None for a teacher that
            runs with the policy.
    """

    advantages: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    value_targets: Tensor | None = None
    keep: Tensor | None = None
    penalty: Tensor | None = None
    teacher: TopTargets | None = None


def needs_proximal(algorithm: AlgorithmConfig) -> bool:
    """Whether the proximal logprobs need a pass of their own.

    With one minibatch they equal the current logprobs. A trust region and a penalty in the reward need them
    before the first optimizer step. SFT, DPO and distillation have no ratio, and the behavior policy's
    logprobs are recorded.
    """
    if algorithm.proximal == "behavior" or algorithm.is_supervised or algorithm.teacher is not None:
        return False
    early = not isinstance(algorithm.trust_region, NoTrustRegion) or isinstance(algorithm.kl_in, KlInReward)
    return algorithm.minibatches > 1 or early


def passes(algorithm: AlgorithmConfig) -> int:
    """Return the cost of training a batch in forward passes of the policy, from which its FLOPs are computed.

    A backward pass counts as two forward passes; a forward pass of the reference or the critic counts as one
    of the policy.
    """
    count = TRAINING + needs_proximal(algorithm) + algorithm.needs_reference
    count += isinstance(algorithm.policy_loss, DpoLoss)  # its pairs
    if algorithm.needs_critic:
        count += 1 + TRAINING
    if algorithm.teacher in ("model", "self"):
        count += 1
    return count


def score(
    forward: Callable[[MicroBatch], Tensor],
    work: Sequence[PlannedMicroBatch],
    *,
    tokens: int,
    ranks: Ranks,
    check_stop: Callable[[], None],
) -> Tensor:
    """Return [tokens] float32, the results of `forward` ([N] for a micro-batch) at the indices of its tokens.
    The result is complete on every rank, with 0 at indices that no micro-batch has. Collective.
    """
    scores = torch.zeros(tokens, dtype=torch.float32, device=ranks.device)
    with torch.no_grad():
        for one in work:
            check_stop()
            scores[one.indices] = forward(one.batch).float()
    return ranks.sum(scores)  # exactly one rank has the value of each index; the others have 0


def gathered(plan: BatchPlan, name: str, ranks: Ranks) -> Tensor:
    """Return [M] float32, the micro-batches' array `name` at the scored tokens of the batch. Collective."""

    def own(batch: MicroBatch) -> Tensor:
        values: Tensor = getattr(batch, name)
        return values

    return score(own, plan.work, tokens=plan.tokens, ranks=ranks, check_stop=lambda: None)


def score_batch(
    plan: BatchPlan,
    policy: Policy,
    algorithm: AlgorithmConfig,
    *,
    critic: Critic | None,
    reference: Reference | None,
    teacher: Teacher | None,
    ranks: Ranks,
    clock: Clock,
    check_stop: Callable[[], None],
    stopping: Callable[[], bool],
    seed: int,
) -> Scores:
    """Run the passes that the algorithm needs: proximal and reference logprobs, values, teacher. Collective.

    Args:
        check_stop: called before every micro-batch; raises on every rank if any rank should stop.
        stopping: whether this rank should stop; called while waiting for a teacher's engine.
        seed: the seed of a trust region's random choices; the same on every rank.
    """

    def over(forward: Callable[[MicroBatch], Tensor]) -> Tensor:
        return score(forward, plan.work, tokens=plan.tokens, ranks=ranks, check_stop=check_stop)

    proximal = reference_logprobs = values = None
    if needs_proximal(algorithm):
        with clock.part("proximal"):
            proximal = over(lambda batch: policy(batch)[0])
    elif algorithm.proximal == "behavior":
        proximal = gathered(plan, "behavior_logprobs", ranks)
    if reference is not None:
        with clock.part("reference"):
            reference_logprobs = over(lambda batch: reference(batch)[0])
            release(reference)
    if critic is not None:
        with clock.part("values"):
            values = over(critic)
    teacher_targets = None
    if teacher is not None and not isinstance(teacher, HeldTeacher):
        with clock.part("teacher"):
            teacher_targets = _teacher_targets(
                plan, policy, teacher, ranks=ranks, check_stop=check_stop, stopping=stopping
            )
    with clock.part("credit"):
        targets = None
        if algorithm.needs_token_credit:
            credit = ranks.from_first(lambda: _credit(plan, algorithm, proximal, reference_logprobs, values))
            advantages, targets = credit[0].to(ranks.device), _on_device(credit[1], ranks)
        else:
            advantages = gathered(plan, "advantages", ranks)
        keep = penalty = None
        if not isinstance(algorithm.trust_region, NoTrustRegion):
            keep, penalty = ranks.from_first(lambda: _choice(plan, algorithm, proximal, advantages, seed))
            keep, penalty = _on_device(keep, ranks), _on_device(penalty, ranks)
    return Scores(advantages, proximal, reference_logprobs, values, targets, keep, penalty, teacher_targets)


def _teacher_targets(
    plan: BatchPlan,
    policy: Policy,
    teacher: EngineTeacher | SelfTeacher,
    *,
    ranks: Ranks,
    check_stop: Callable[[], None],
    stopping: Callable[[], bool],
) -> TopTargets:
    """The teacher's most likely tokens at the M scored tokens of the batch. Collective."""
    if isinstance(teacher, EngineTeacher):
        targets = teacher.score(plan.samples if ranks.is_first else None, stopping=stopping)
        if targets is None:
            check_stop()
            raise AssertionError("a stop was requested on the first rank, but check_stop() did not raise")
        return targets
    ids = torch.zeros((plan.tokens, teacher.top), dtype=torch.int64, device=ranks.device)
    logprobs = torch.zeros((plan.tokens, teacher.top), dtype=torch.float32, device=ranks.device)
    for work in plan.with_demonstrations:
        check_stop()
        ids[work.indices], logprobs[work.indices] = policy.top_logprobs(work.batch, teacher.top)
    release(policy)
    return TopTargets(ranks.sum(ids), ranks.sum(logprobs))


def release(model: nn.Module | BaseOfAdapter) -> None:
    """Free the gathered weights that a sharded model keeps after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def scored(samples: Sequence[TrainingSample], name: str, device: torch.device) -> Tensor:
    """Return [M] float32, the values of the samples' array `name` at the scored tokens."""
    arrays = [getattr(sample, name)[sample.scored_mask] for sample in samples]
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32)).to(device)


def _credit(
    plan: BatchPlan,
    algorithm: AlgorithmConfig,
    proximal: Tensor | None,
    reference: Tensor | None,
    values: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return advantages [M] and value targets [M], on the CPU."""
    assert plan.data is not None
    penalties = None
    if isinstance(algorithm.kl_in, KlInReward):
        assert proximal is not None and reference is not None
        estimates = kl_estimate(proximal, reference, estimator=algorithm.kl_in.kl_estimator)
        penalties = by_sample(estimates, plan.samples)
    credit = token_advantages(
        plan.data,
        values=None if values is None else by_sample(values, plan.samples),
        penalties=penalties,
        config=algorithm,
    )

    def whole(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.float32))

    return whole(credit.advantages), None if credit.value_targets is None else whole(credit.value_targets)


def _choice(
    plan: BatchPlan, algorithm: AlgorithmConfig, proximal: Tensor | None, advantages: Tensor, seed: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return what a trust region keeps of the M tokens, and its penalty, see `Scores`, on the CPU; made per
    minibatch over its trained tokens."""
    region = algorithm.trust_region
    assert proximal is not None and not isinstance(region, NoTrustRegion)
    behavior = scored(plan.samples, "behavior_logprobs", proximal.device)
    trained = scored(plan.samples, "loss_mask", proximal.device).bool()
    rng = np.random.default_rng(seed)
    keep = penalty = None
    for part in plan.minibatches:
        at = part.tokens.start + torch.nonzero(trained[part.tokens]).squeeze(1)
        choice = region.choose(behavior[at], proximal[at], advantages[at], rng=rng)
        if choice.keep is not None:
            keep = torch.ones_like(trained) if keep is None else keep
            keep[at] = choice.keep
        if choice.penalty is not None:
            penalty = torch.zeros_like(proximal) if penalty is None else penalty
            penalty[at] = choice.penalty
    return None if keep is None else keep.cpu(), None if penalty is None else penalty.cpu()


def _on_device(tensor: Tensor | None, ranks: Ranks) -> Tensor | None:
    return None if tensor is None else tensor.to(ranks.device)
