"""One batch: proximal logprobs where they are needed, then K optimizer steps of decoupled PPO.

Every micro-batch's loss is divided by the token count of its whole minibatch, so the gradient is
the same however the batch was cut and however many ranks share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_agents.algorithms.losses import LossStatistics, decoupled_ppo_loss
from areal_agents.algorithms.minibatches import split_minibatches
from areal_agents.algorithms.packing import MicroBatch, pack
from areal_agents.core.sample import TrainingSample
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import Policy


class Stopped(Exception):
    """The run was asked to stop in the middle of a batch.

    Attributes:
        clean: whether no optimizer step of the batch was made, so that the weights are still those
            of the step before.
    """

    def __init__(self, *, clean: bool) -> None:
        super().__init__("stopped in the middle of a batch")
        self.clean = clean


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a batch is trained with; the names are those of the configs."""

    clip_low: float
    clip_high: float
    weight_cap: float
    minibatches: int
    microbatch_tokens: int
    share_prefixes: bool
    grad_clip: float


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What training a batch came to, summed over its minibatches and ranks.

    Attributes:
        statistics: of the losses.
        grad_norm: mean over the minibatches of the norm before clipping; skipped ones are left out.
        skipped_steps: optimizer steps left out because the gradient was not finite.
        microbatches: forward and backward passes, over all ranks.
        model_tokens: tokens that went through the model; sample_tokens: what they would have been
            without shared prefixes.
    """

    statistics: LossStatistics
    grad_norm: float
    skipped_steps: int
    microbatches: int
    model_tokens: int
    sample_tokens: int

    @classmethod
    def nothing(cls) -> StepResult:
        """The result of a batch without a sample."""
        return cls(LossStatistics.zero(), math.nan, 0, 0, 0, 0)


def train_batch(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[TrainingSample],
    options: StepOptions,
    *,
    ranks: Ranks,
    version: int,
    seed: int,
    stopping: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Train on a batch of samples, which every rank has whole.

    Args:
        version: the version of the weights as they are now, for the statistics.
        seed: of the order of minibatches.
        stopping: asked before every micro-batch; all ranks stop as soon as one of them should.

    Raises:
        Stopped: `stopping()` became true. Gradients are discarded.
        TrainingError: a sample does not fit a micro-batch.
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("there is no sample to train on")
    parts = split_minibatches(samples, options.minibatches, seed=seed)
    packed = [
        pack(
            part,
            token_budget=options.microbatch_tokens,
            ranks=ranks.count,
            share_prefixes=options.share_prefixes,
        )
        for part in parts
    ]
    mine = [[batch.to(ranks.device) for batch in batches[ranks.rank :: ranks.count]] for batches in packed]
    proximal = [_proximal_logprobs(policy, batches) for batches in mine] if len(mine) > 1 else None
    statistics, norms = LossStatistics.zero(ranks.device), []
    for index, batches in enumerate(mine):
        denominator = sum(batch.trained_tokens for batch in packed[index])
        for place, batch in enumerate(batches):
            if ranks.any(stopping()):
                optimizer.zero_grad()
                raise Stopped(clean=index == 0)
            cast(FSDPModule, policy).set_requires_gradient_sync(place == len(batches) - 1)
            prox = proximal[index][place] if proximal is not None else None
            loss, part = _loss(policy, batch, prox, options, denominator=denominator, version=version)
            (loss * ranks.count).backward()  # FSDP averages over ranks, the loss is a sum
            statistics += part
        norms.append(_optimizer_step(policy, optimizer, options.grad_clip))
    everything = [batch for batches in packed for batch in batches]
    taken = [norm for norm in norms if norm is not None]
    return StepResult(
        statistics=LossStatistics(ranks.sum(statistics.sums), ranks.max(statistics.maxima)),
        grad_norm=sum(taken) / len(taken) if taken else math.nan,
        skipped_steps=len(norms) - len(taken),
        microbatches=len(everything),
        model_tokens=sum(len(batch.input_ids) for batch in everything),
        sample_tokens=sum(batch.sample_tokens for batch in everything),
    )


def _optimizer_step(
    policy: torch.nn.Module, optimizer: torch.optim.Optimizer, grad_clip: float
) -> float | None:
    """Step with the gradient scaled to a norm of at most `grad_clip`, and clear it.

    Returns:
        The norm before scaling; None if it is not finite, and then the weights stay as they are.
    """
    parameters = [p for p in policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    finite = bool(torch.isfinite(whole))
    if finite:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
        optimizer.step()
    optimizer.zero_grad()
    return float(whole) if finite else None


def _loss(
    policy: Policy,
    batch: MicroBatch,
    proximal: Tensor | None,
    options: StepOptions,
    *,
    denominator: int,
    version: int,
) -> tuple[Tensor, LossStatistics]:
    """The loss of one micro-batch; with `proximal` None the current logprobs, detached, are it."""
    current, entropy = policy(batch)
    return decoupled_ppo_loss(
        current,
        current.detach() if proximal is None else proximal,
        batch.behavior_logprobs,
        batch.advantages,
        torch.ones_like(batch.target_ids, dtype=torch.bool),
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        weight_cap=options.weight_cap,
        denominator=denominator,
        on_policy=batch.versions == version,
        entropy=entropy,
    )


@torch.no_grad()
def _proximal_logprobs(policy: Policy, batches: Sequence[MicroBatch]) -> list[Tensor]:
    return [policy(batch)[0] for batch in batches]
