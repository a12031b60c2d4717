"""Checks whether groups can be trained on, and names what is wrong with each that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import PreparedGroup, TrainingData, prepare_group
from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import StoreError, TrainingError
from areal_agents.inference.expert_routing import ExpertLayout
from areal_agents.store import Store

_UNREADABLE = (ValueError, KeyError, TypeError, StoreError)  # raised for rows that contain no valid episode


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """The limits that a sample must stay within.

    Attributes:
        microbatch_tokens: number of tokens of the longest model input.
        vocab_size: token ids must be below it.
        experts: the expert layers that routing is recorded for, None for a model without experts.
        teacher_tokens: number of tokens of the longest sequence that the teacher's engine scores, None
            without such a teacher.
    """

    microbatch_tokens: int
    vocab_size: int
    experts: ExpertLayout | None = None
    teacher_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why a group is not trained on: it is "bad", "stale", or its scores are all "equal"."""

    kind: Literal["bad", "stale", "equal"]
    reason: str


def read_groups(store: Store, group_ids: Sequence[str]) -> list[RolloutGroup | Refused]:
    """Read the groups in the order of `group_ids`; each is refused if its rows in the store are invalid."""
    try:
        return [*store.load_groups(group_ids)]
    except _UNREADABLE:
        return [_read_group(store, group_id) for group_id in group_ids]


def _read_group(store: Store, group_id: str) -> RolloutGroup | Refused:
    try:
        return store.load_groups([group_id])[0]
    except _UNREADABLE as error:
        return Refused("bad", f"it cannot be read: {error}")


def prepare(group: RolloutGroup, algorithm: AlgorithmConfig) -> PreparedGroup | Refused:
    """Return the prepared group, or a refusal if its rewards or completions are invalid."""
    try:
        return prepare_group(group, algorithm)
    except (ValueError, TrainingError) as error:
        return Refused("bad", str(error))


def refused_samples(
    data: TrainingData, algorithm: AlgorithmConfig, *, limits: SampleLimits, version: int | None
) -> dict[str, Refused]:
    """Return by group id why groups cannot be trained on because of one of their samples.

    Args:
        version: the trainer's version; no token may have a later one. None for recorded groups, whose
            versions belong to another run.
    """
    refused: dict[str, Refused] = {}
    for sample in data.samples:
        if sample.group_id in refused:
            continue
        before = len(data.demonstrations.get(sample.episode_id, ()))
        fault = _fault(sample, limits, version, demonstration=before)
        if fault is None and algorithm.teacher == "engine":
            fault = _fault_for_engine(sample, limits.teacher_tokens)
        if fault:
            refused[sample.group_id] = Refused("bad", f"episode {sample.episode_id}: {fault}")
    return refused


def equal_refusal(algorithm: AlgorithmConfig) -> Refused:
    """Return the refusal of a group with equal scores."""
    same = "episodes have the same score" if algorithm.compares_scores else "advantages are 0"
    return Refused("equal", f"all its {same}")


def _fault_for_engine(sample: TrainingSample, longest: int | None) -> str | None:
    """The reason why an engine cannot score a sample as its teacher, None if it can."""
    tokens = int(np.flatnonzero(sample.scored_mask)[-1]) + 1
    if longest is not None and tokens > longest:
        return (
            f"a sample of {tokens} tokens is longer than the {longest} that the teacher's engine scores; "
            "start it with a longer context, or lower rollout.limits.context_tokens"
        )
    temperatures = sample.temperatures[sample.scored_mask]
    if (temperatures != 1).any():
        return (
            f"tokens sampled at temperature {temperatures[temperatures != 1][0]:g}, and a teacher's engine "
            "scores at 1; pin the temperature, or use a teacher that the trainer holds (teacher: model)"
        )
    return None


def _fault(
    sample: TrainingSample, limits: SampleLimits, version: int | None, *, demonstration: int
) -> str | None:
    tokens = int(np.flatnonzero(sample.loss_mask)[-1])  # the model input ends before the last trained token
    if tokens > limits.microbatch_tokens:
        return (
            f"a sample of {tokens} tokens does not fit a micro-batch of {limits.microbatch_tokens}; raise "
            "trainer.microbatch_tokens, or lower rollout.limits.context_tokens"
        )
    if demonstration + tokens > limits.microbatch_tokens:
        return (
            f"a sample of {tokens} tokens after a demonstration of {demonstration} does not fit a "
            f"micro-batch of {limits.microbatch_tokens}; raise trainer.microbatch_tokens"
        )
    low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
    if low < 0 or high >= limits.vocab_size:
        return f"token {low if low < 0 else high} is not in the model's vocabulary of {limits.vocab_size}"
    routing, experts = sample.routed_experts, limits.experts
    if routing is not None and experts and routing.shape[1:] != (experts.layers, experts.per_token):
        return (
            f"its routed experts cover {routing.shape[1]} layers, {routing.shape[2]} per token, but the "
            f"model has {experts.layers} layers, {experts.per_token} per token: another model was served"
        )
    newest = int(sample.versions[sample.scored_mask].max())
    if version is not None and newest > version:
        return f"a token has version {newest}, but the trainer is at version {version}"
    return None
