"""Samples from groups: the right tokens, each once, with the right advantage."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from algorithms_support import episode, group, random_episode, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import build_samples, episode_samples
from areal_agents.core.trajectory import Fork

GRPO = AlgorithmConfig()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_each_sampled_token_is_trained_exactly_once(seed: int, turns: int) -> None:
    recorded = random_episode(random.Random(seed), turns=turns)
    advantages = {t.id: float(i) for i, t in enumerate(recorded.turns)}
    samples = episode_samples(recorded, advantages, group_id="g", config=GRPO)
    trained = Counter(int(token) for s in samples for token in s.token_ids[s.loss_mask])
    expected = Counter(int(token) for t in recorded.turns for token in t.completion.token_ids)
    assert trained == expected
    by_token = {int(token): advantages[t.id] for t in recorded.turns for token in t.completion.token_ids}
    for s in samples:  # every token carries its own turn's advantage and logprob
        assert s.advantages[s.loss_mask].tolist() == [by_token[int(i)] for i in s.token_ids[s.loss_mask]]
        assert (s.advantages[~s.loss_mask] == 0).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_a_sample_is_the_start_of_what_the_model_saw(seed: int, turns: int) -> None:
    recorded = random_episode(random.Random(seed), turns=turns)
    samples = episode_samples(
        recorded, dict.fromkeys([t.id for t in recorded.turns], 1.0), group_id="g", config=GRPO
    )
    paths = [path.token_ids for path in recorded.forest.trajectories()]
    for s in samples:
        assert any(np.array_equal(path[: len(s)], s.token_ids) for path in paths)
        assert s.loss_mask[-1]  # nothing after the last trained token


def test_a_branch_shares_its_first_turn_with_another_and_trains_its_own() -> None:
    forked = episode(
        [turn("a", prompt=[1], sampled=[2]), turn("b", "a", prompt=[3], sampled=[4]),
         turn("c", "a", prompt=[5], sampled=[6])],
        by_turn={"b": 1.0},
    )  # fmt: skip
    other = episode([turn("d", prompt=[1], sampled=[7])], 0.0, id="f")
    samples, report = build_samples([group([forked, other])], AlgorithmConfig(advantage_std="none"))
    # scores 1 and 0, mean 0.5; returns a = 0.5, b = 1, c = 0, d = 0
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 4], [1, 2, 5, 6], [1, 7]]
    assert [s.loss_mask.tolist() for s in samples] == [
        [False, True, False, True], [False, False, False, True], [False, True],
    ]  # fmt: skip
    assert [s.advantages[s.loss_mask].tolist() for s in samples] == [[0.0, 0.5], [-0.5], [-0.5]]
    assert (report.turns, report.branches, report.solved_some) == (4, 3, 1)


def test_equal_groups_are_left_out_when_asked_and_counted() -> None:
    groups = [
        group([episode([turn("a")], 1.0), episode([turn("b")], 1.0)], id="all"),
        group([episode([turn("c")], 0.0), episode([turn("d")], 0.0)], id="none"),
        group([episode([turn("e")], 0.0), episode([turn("f")], 1.0)], id="some"),
    ]
    samples, report = build_samples(groups, GRPO)
    assert {s.group_id for s in samples} == {"some"} and len(samples) == 2
    assert (report.solved_all, report.solved_none, report.solved_some, report.dropped_groups) == (1, 1, 1, 2)
    assert report.rewards == (1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    kept, report = build_samples(groups, AlgorithmConfig(drop_equal_groups=False))
    assert len(kept) == 6 and report.dropped_groups == 0
    assert all((s.advantages == 0).all() for s in kept if s.group_id != "some")


def test_constrained_turns_are_recorded_but_not_trained_unless_asked() -> None:
    def turns() -> list:
        return [
            turn("a", prompt=[1], sampled=[2, 3], constrained=True),
            turn("b", "a", prompt=[4], sampled=[5]),
        ]

    mixed = group([episode(turns(), 1.0), episode(turns(), 0.0, id="f")])
    samples, report = build_samples([mixed], GRPO)
    assert [s.loss_mask.tolist() for s in samples] == [[False, False, False, False, True]] * 2
    assert (report.sampled_tokens, report.untrained_tokens) == (6, 4)
    samples, report = build_samples([mixed], AlgorithmConfig(train_constrained=True))
    assert [int(s.loss_mask.sum()) for s in samples] == [3, 3] and report.untrained_tokens == 0


def test_an_episode_without_a_trained_token_has_no_sample_but_counts_in_the_baseline() -> None:
    aborted = episode([turn("a", finish="abort")], 0.0, status="truncated")
    empty = episode([], 0.0, id="e0")
    good = episode([turn("b")], 3.0, id="e1")
    samples, report = build_samples([group([aborted, empty, good])], AlgorithmConfig(advantage_std="none"))
    assert [s.episode_id for s in samples] == ["e1"]
    assert samples[0].advantages[samples[0].loss_mask].tolist() == [2.0, 2.0]
    assert report.truncated == 1


def test_the_report_counts_versions_and_forks() -> None:
    fork = Fork("a", "edited", 1)
    recorded = episode([turn("a", versions=[3, 4]), turn("b", versions=[4, 5], forked_from=fork)], 1.0)
    _, report = build_samples([group([recorded, episode([turn("c")], 0.0, id="f")])], GRPO)
    assert report.versions_per_rollout == 2.0  # three and one
    assert report.forks == {"edited": 1}


def test_versions_and_temperatures_travel_with_their_tokens() -> None:
    hot = turn("a", prompt=[1, 1], sampled=[2, 3], versions=[6, 7], temperature=0.7)
    samples, _ = build_samples([group([episode([hot], 1.0), episode([turn("b")], 0.0, id="f")])], GRPO)
    assert samples[0].versions.tolist() == [-1, -1, 6, 7]
    assert samples[0].temperatures.tolist() == pytest.approx([1, 1, 0.7, 0.7])
    assert samples[0].behavior_logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2])
