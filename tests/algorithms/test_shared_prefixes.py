"""Ratios of whole root-to-leaf paths whose branches share turns, compared with a float64 oracle.

A token that several branches share is trained only in the first of them. The ratio of every branch is still
that of its whole path: of all trained tokens from the root to the leaf, including those trained elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from algorithms_support import episode, group, random_episode, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.objective import Objective, policy_loss
from areal_agents.algorithms.losses.statistics import LossStatistics
from areal_agents.algorithms.ordering import ordered_turns
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.samples import build_training_data
from areal_agents.algorithms.staleness import mask_stale
from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.sample import TrainingSample

PARTS = {
    "gspo": {"policy_loss": "gspo", "clip_low": 0.05, "clip_high": 0.05, "correction": "none"},
    "gspo, geometric": {
        "policy_loss": "gspo", "clip_low": 0.05, "clip_high": 0.05, "correction_level": "geometric",
    },
    "sequence": {"correction_level": "sequence", "clip_low": 0.99, "clip_high": 100.0, "weight_cap": 1.5},
    "geometric": {
        "correction": "mask", "correction_level": "geometric", "weight_floor": 0.9, "weight_cap": 1.2,
        "clip_low": 0.99, "clip_high": 100.0,
    },
    "veto": {"veto": 0.6, "clip_low": 0.99, "clip_high": 100.0},
}  # fmt: skip


@dataclass
class Numbers:
    """The logprobs of every token, indexed by token id; every sampled token has a unique id."""

    current: np.ndarray
    proximal: np.ndarray
    behavior: np.ndarray

    @classmethod
    def random(cls, seed: int, size: int) -> Numbers:
        rng = np.random.default_rng(seed)
        proximal = rng.uniform(-3, -0.1, size)
        behavior = (proximal + rng.normal(0, 0.3, size)).astype(np.float32).astype(np.float64)
        return cls(proximal + rng.normal(0, 0.1, size), proximal, behavior)


def forest(seed: int, *, versions: bool = False) -> list[RecordedEpisode]:
    """Two episodes of one group with different rewards on their turns; token ids count up from 1."""
    rng = random.Random(seed)
    made = []
    for index in range(2):
        plain = random_episode(rng, id=f"e{index}", turns=7, start=1 + 200 * index, dense=True)
        turns = list(plain.turns)
        if versions:
            drawn = [[rng.randint(0, 3) for _ in t.completion.token_ids] for t in turns]
            turns = [
                replace(t, completion=replace(t.completion, versions=each))
                for t, each in zip(turns, drawn, strict=True)
            ]
        made.append(RecordedEpisode(plain.id, plain.task, tuple(turns), plain.status, plain.rewards))
    return made


def paths(recorded: RecordedEpisode, *, newest: int, bound: int) -> list[list[int]]:
    """The ids of the trained tokens of each root-to-leaf path, without tokens beyond the bound."""
    by_id = {t.id: t for t in recorded.turns}
    continued = {t.parent for t in recorded.turns}
    found = []
    for leaf in ordered_turns(recorded.turns):
        if leaf.id in continued:
            continue
        path, at = [], leaf
        while True:
            path.append(at)
            if at.parent is None:
                break
            at = by_id[at.parent]
        found.append(
            [
                int(token)
                for t in reversed(path)
                if not t.constrained
                for token, version in zip(t.completion.token_ids, t.completion.versions, strict=True)
                if newest - version <= bound
            ]
        )
    return found


def oracle(
    episodes: Sequence[RecordedEpisode],
    numbers: Numbers,
    advantage: dict[int, float],
    config: AlgorithmConfig,
    bound: int,
) -> tuple[float, dict[int, float], dict[str, float]]:
    """The loss, its gradient by token id, and statistics, computed path by path."""
    per_episode = [paths(e, newest=3, bound=bound) for e in episodes]
    lengths = [len({i for path in of for i in path}) for of in per_episode]
    present = sum(length > 0 for length in lengths)
    loss, gradient = 0.0, {}
    seen = dict.fromkeys(
        ("tokens", "sequences", "weight", "weight_raw", "rejected_tokens", "ratio", "abs_diff"), 0.0
    )
    loss_part, correction = config.policy_loss, config.correction
    for of_episode, length in zip(per_episode, lengths, strict=True):
        for path in of_episode:
            own = [i for i in path if i not in gradient]
            u = [numbers.current[i] - numbers.proximal[i] for i in path]
            w = {i: numbers.proximal[i] - numbers.behavior[i] for i in path}
            seen["sequences"] += bool(own)
            for i in own:
                level = getattr(correction, "correction_level", "token")
                raw = {
                    "token": w[i], "sequence": sum(w.values()), "geometric": sum(w.values()) / len(w),
                }[level] if correction.kind != "none" else 0.0  # fmt: skip
                raw = float(np.exp(raw))
                weight, out = raw, False
                if correction.kind == "truncate":
                    weight = min(raw, correction.weight_cap)
                    out = correction.veto is not None and min(w.values()) < np.log(correction.veto)
                elif correction.kind == "mask":
                    out = not correction.weight_floor <= raw <= correction.weight_cap
                weight = 0.0 if out else weight
                token = numbers.current[i] - numbers.proximal[i]
                ratio = float(np.exp(sum(u) / len(u) if loss_part.kind == "gspo" else token))
                a, c = advantage[i], 1 / (present * length)
                clipped = min(max(ratio, 1 - loss_part.clip_low), 1 + loss_part.clip_high)
                loss -= c * weight * min(ratio * a, clipped * a)
                gradient[i] = -c * weight * ratio * a if ratio * a <= clipped * a else 0.0
                for name, value in (
                    ("tokens", 1), ("weight", weight), ("weight_raw", raw), ("rejected_tokens", out),
                    ("ratio", np.exp(token)), ("abs_diff", abs(w[i])),
                ):  # fmt: skip
                    seen[name] += value
    return loss, gradient, seen


def with_behavior(s: TrainingSample, numbers: Numbers) -> TrainingSample:
    scored = s.scored_mask
    return replace(s, behavior_logprobs=np.where(scored, numbers.behavior[s.token_ids], 0).astype(np.float32))


def measured(
    samples: Sequence[TrainingSample], numbers: Numbers, config: AlgorithmConfig, **packing: object
) -> tuple[float, np.ndarray, dict[str, float]]:
    """The loss of the packed samples, its gradient by token id, and its statistics."""
    weights = config.loss_normalization.weights(samples)
    theta = torch.tensor(numbers.current, requires_grad=True)
    loss, total = torch.zeros((), dtype=torch.float64), LossStatistics.zero()
    for batch in pack(samples, weights=weights, **packing):  # type: ignore[arg-type]
        ids = batch.target_ids
        part, statistics, _ = policy_loss(
            theta[ids], Objective.of(config),
            proximal=torch.tensor(numbers.proximal)[ids], behavior=batch.behavior_logprobs.double(),
            advantages=batch.advantages.double(), loss_weights=batch.loss_weights.double(),
            sequence_ids=batch.sample_index, turn_ids=batch.turn_ids, trained=batch.trained,
        )  # fmt: skip
        loss, total = loss + part, total + statistics
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad.numpy(), total.as_dict()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("bound", [0, 3])
@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), share=st.booleans(), budget=st.sampled_from([60, 1000]))
def test_every_branch_has_the_ratio_of_its_whole_path(
    parts: str, bound: int, seed: int, share: bool, budget: int
) -> None:
    config = AlgorithmConfig.model_validate(
        {
            "loss_normalization": "sequence_mean",
            "advantage_std": "none",
            "credit": "reward_to_go",
            **PARTS[parts],
        }
    )
    episodes, numbers = forest(seed, versions=True), Numbers.random(seed, 500)
    built = build_training_data([group(episodes)], config).samples
    samples, _ = mask_stale([with_behavior(s, numbers) for s in built], version=3, max_staleness=bound)
    if not samples:
        return
    advantage = {
        int(i): float(a)
        for s in samples
        for i, a in zip(s.token_ids[s.loss_mask], s.advantages[s.loss_mask], strict=True)
    }
    loss, gradient, statistics = oracle(episodes, numbers, advantage, config, bound)
    assert gradient.keys() == advantage.keys()
    got, slope, seen = measured(samples, numbers, config, token_budget=budget, share_prefixes=share)
    assert got == pytest.approx(loss, rel=1e-6, abs=1e-6)  # the weights c are float32
    expected = np.zeros(500)
    expected[list(gradient)] = list(gradient.values())
    assert slope == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert {name: seen[name] for name in statistics} == pytest.approx(statistics, rel=1e-6)


def test_ratios_of_two_branches_by_hand() -> None:
    """Behavior logprobs are −1 and proximal ones −1 + log w: w is 2 for the shared turn, then 3 and 0.5."""
    turns = [
        turn("a", prompt=[1], sampled=[2]), turn("b", "a", prompt=[3], sampled=[4]),
        turn("c", "a", prompt=[5], sampled=[6]),
    ]  # fmt: skip
    config = AlgorithmConfig(correction_level="sequence", weight_cap=100.0, advantage_std="none")
    data = build_training_data(
        [group([episode(turns, 1.0), episode([turn("x", sampled=[7])], 0.0, id="f")])], config
    )
    proximal = np.full(8, -1.0)
    proximal[[2, 4, 6]] += np.log([2, 3, 0.5])
    numbers = Numbers(proximal, proximal, np.full(8, -1.0))
    samples = [with_behavior(s, numbers) for s in data.samples]
    _, gradient, statistics = measured(samples, numbers, config, token_budget=100)
    # a and b are on a path of weight 6; the path of c has weight 2 · 0.5 = 1, and c alone 0.5
    assert gradient[[2, 4, 6, 7]] == pytest.approx(np.array([-6, -6, -1, 1]) * 0.5 / 4)
    assert (statistics["tokens"], statistics["sequences"], statistics["weight"]) == (4, 3, 6 + 6 + 1 + 1)


def test_a_shared_prefix_goes_through_the_model_once() -> None:
    """Scoring it in both branches adds entries to the loss, but no rows to the input of the model."""
    turns = [
        turn("a", prompt=range(1, 41), sampled=[50, 51]), turn("b", "a", prompt=[52], sampled=[53]),
        turn("c", "a", prompt=[54], sampled=[55]),
    ]  # fmt: skip
    groups = [group([episode(turns, 1.0), episode([turn("x")], 0.0, id="f")])]
    plain, by_path = (
        pack(build_training_data(groups, AlgorithmConfig(**parts)).samples, token_budget=200)[0]  # type: ignore[arg-type]
        for parts in ({}, {"policy_loss": "gspo"})
    )
    assert plain.input_ids.tolist() == by_path.input_ids.tolist()
    assert (plain.scored_tokens, by_path.scored_tokens) == (6, 8)
    assert int(plain.trained.sum()) == int(by_path.trained.sum()) == 6
    again = by_path.target_ids[~by_path.trained]
    assert again.tolist() == [50, 51] and (by_path.loss_weights[~by_path.trained] == 0).all()
    rows = {int(i): int(row) for i, row in zip(plain.target_ids, plain.predictor_rows, strict=True)}
    assert by_path.predictor_rows[~by_path.trained].tolist() == [rows[50], rows[51]]


def test_an_invalid_prefix_mask_is_refused() -> None:
    config = AlgorithmConfig(policy_loss="gspo")
    turns = [turn("a", prompt=[1], sampled=[2]), turn("b", "a", prompt=[3], sampled=[4]),
             turn("c", "a", prompt=[5], sampled=[6])]  # fmt: skip
    data = build_training_data([group([episode(turns, 1.0), episode([turn("x")], 0.0, id="f")])], config)
    branch = next(s for s in data.samples if s.prefix_mask is not None)
    with pytest.raises(ValueError, match="trained both here and by another sample"):
        replace(branch, prefix_mask=branch.loss_mask)
    with pytest.raises(ValueError, match="the first token cannot be trained"):
        replace(branch, prefix_mask=np.arange(len(branch)) == 0)
    with pytest.raises(ValueError, match="all arrays must have one length"):
        replace(branch, prefix_mask=np.zeros(1, bool))
