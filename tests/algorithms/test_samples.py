"""Samples of groups contain each trained token once, with the right advantage."""

from __future__ import annotations

import math
import random
import re
from collections import Counter

import numpy as np
import pytest
from algorithms_support import episode, group, random_episode, random_groups, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.report import BatchReport
from areal_agents.algorithms.samples import build_training_data, episode_samples
from areal_agents.core.rollout import Reward, RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.core.trajectory import Fork
from areal_agents.errors import TrainingError

GRPO = AlgorithmConfig()


def built(groups: list[RolloutGroup], config: AlgorithmConfig) -> tuple[list[TrainingSample], BatchReport]:
    data = build_training_data(groups, config)
    return list(data.samples), data.report


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_each_sampled_token_is_trained_exactly_once(seed: int, turns: int) -> None:
    recorded = random_episode(random.Random(seed), turns=turns)
    samples = episode_samples(recorded, np.arange(turns, dtype=float), group_id="g", config=GRPO)
    trained = Counter(int(token) for s in samples for token in s.token_ids[s.loss_mask])
    expected = Counter(int(token) for t in recorded.turns for token in t.completion.token_ids)
    assert trained == expected
    by_token = {int(token): i for i, t in enumerate(recorded.turns) for token in t.completion.token_ids}
    for s in samples:  # every token has the advantage and the index of its turn
        assert s.advantages[s.loss_mask].tolist() == [by_token[int(i)] for i in s.token_ids[s.loss_mask]]
        assert (s.advantages[~s.loss_mask] == 0).all()
        assert s.turn_index.tolist() == [by_token.get(int(i), -1) for i in s.token_ids]


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_a_sample_is_the_beginning_of_a_root_to_leaf_path(seed: int, turns: int) -> None:
    recorded = random_episode(random.Random(seed), turns=turns)
    samples = episode_samples(recorded, np.ones(turns), group_id="g", config=GRPO)
    paths = [path.token_ids for path in recorded.forest.trajectories()]
    for s in samples:
        assert any(np.array_equal(path[: len(s)], s.token_ids) for path in paths)
        assert s.loss_mask[-1]  # nothing after the last trained token


BY_PATH = [
    {"policy_loss": "gspo"},
    {"correction_level": "sequence"},
    {"correction_level": "geometric"},
    {"veto": 0.1},
]
NOT_BY_PATH = [{}, {"policy_loss": "gspo", "gspo_level": "turn"}, {"correction_level": "turn_geometric"}]


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10), st.sampled_from(BY_PATH))
def test_a_branch_scores_the_trained_tokens_that_it_shares_if_the_loss_uses_paths(
    seed: int, turns: int, parts: dict
) -> None:
    recorded = random_episode(random.Random(seed), turns=turns, dense=True)
    plain = episode_samples(recorded, np.ones(turns), group_id="g", config=GRPO)
    by_path = episode_samples(recorded, np.ones(turns), group_id="g", config=AlgorithmConfig(**parts))
    constrained = {int(i) for t in recorded.turns if t.constrained for i in t.completion.token_ids}
    sampled = {int(i) for t in recorded.turns for i in t.completion.token_ids}
    for s, other in zip(by_path, plain, strict=True):
        assert s.token_ids.tolist() == other.token_ids.tolist()
        assert s.loss_mask.tolist() == other.loss_mask.tolist()  # still trained only once
        assert other.prefix_mask is None
        expected = [int(i) for i in s.token_ids if int(i) in sampled - constrained]
        assert s.token_ids[s.scored_mask].tolist() == expected
        assert (s.turn_index[s.scored_mask] >= 0).all() and (s.advantages[~s.loss_mask] == 0).all()


@pytest.mark.parametrize("parts", NOT_BY_PATH)
def test_a_branch_scores_only_its_own_tokens_if_the_loss_uses_no_paths(parts: dict) -> None:
    recorded = random_episode(random.Random(3), turns=9)
    samples = episode_samples(recorded, np.ones(9), group_id="g", config=AlgorithmConfig(**parts))
    assert len(samples) > 2 and all(s.prefix_mask is None for s in samples)


def test_a_branch_contains_a_shared_first_turn_and_trains_only_its_own_turn() -> None:
    forked = episode(
        [turn("a", prompt=[1], sampled=[2]), turn("b", "a", prompt=[3], sampled=[4]),
         turn("c", "a", prompt=[5], sampled=[6])],
        by_turn={"b": 1.0},
    )  # fmt: skip
    other = episode([turn("d", prompt=[1], sampled=[7])], 0.0, id="f")
    config = AlgorithmConfig(advantage_std="none", credit="reward_to_go")
    samples, report = built([group([forked, other])], config)
    # D(0) is 1 for a; D(1) is 1 for b and c, which both began after a; both are 0 for the other episode
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 4], [1, 2, 5, 6], [1, 7]]
    assert [s.loss_mask.tolist() for s in samples] == [
        [False, True, False, True], [False, False, False, True], [False, True],
    ]  # fmt: skip
    assert [s.advantages[s.loss_mask].tolist() for s in samples] == [[0.5, 0.5], [0.5], [-0.5]]
    assert (report.turns, report.branches, report.solved_some) == (4, 3, 1)


def test_equal_groups_are_counted_and_dropped_unless_configured_otherwise() -> None:
    groups = [
        group([episode([turn("a")], 1.0, id="a"), episode([turn("b")], 1.0, id="b")], id="all"),
        group([episode([turn("c")], 0.0, id="c"), episode([turn("d")], 0.0, id="d")], id="none"),
        group([episode([turn("e")], 0.0, id="e"), episode([turn("f")], 1.0, id="f")], id="some"),
    ]
    samples, report = built(groups, GRPO)
    assert {s.group_id for s in samples} == {"some"} and len(samples) == 2
    assert (report.solved_all, report.solved_none, report.solved_some, report.dropped_groups) == (1, 1, 1, 2)
    assert report.rewards == (1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    assert report.equal_groups == ("all", "none") and report.rewards_by_name == {"return": 0.5}
    kept, report = built(groups, AlgorithmConfig(drop_equal_groups=False))
    assert len(kept) == 6 and report.dropped_groups == 0
    assert all((s.advantages == 0).all() for s in kept if s.group_id != "some")


def test_constrained_turns_are_not_trained_unless_configured() -> None:
    def turns() -> list:
        return [
            turn("a", prompt=[1], sampled=[2, 3], constrained=True),
            turn("b", "a", prompt=[4], sampled=[5]),
        ]

    mixed = group([episode(turns(), 1.0), episode(turns(), 0.0, id="f")])
    samples, report = built([mixed], GRPO)
    assert [s.loss_mask.tolist() for s in samples] == [[False, False, False, False, True]] * 2
    assert (report.sampled_tokens, report.untrained_tokens) == (6, 4)
    samples, report = built([mixed], AlgorithmConfig(train_constrained=True))
    assert [int(s.loss_mask.sum()) for s in samples] == [3, 3] and report.untrained_tokens == 0


def test_an_episode_without_a_trained_token_has_no_sample_but_counts_in_the_baseline() -> None:
    aborted = episode([turn("a", finish="abort")], 0.0, status="truncated")
    empty = episode([], 0.0, id="e0")
    good = episode([turn("b")], 3.0, id="e1")
    samples, report = built([group([aborted, empty, good])], AlgorithmConfig(advantage_std="none"))
    assert [s.episode_id for s in samples] == ["e1"]
    assert samples[0].advantages[samples[0].loss_mask].tolist() == [2.0, 2.0]
    assert report.truncated == 1


def test_the_report_counts_versions_and_forks() -> None:
    fork = Fork("a", "edited", 1)
    recorded = episode([turn("a", versions=[3, 4]), turn("b", versions=[4, 5], forked_from=fork)], 1.0)
    _, report = built([group([recorded, episode([turn("c")], 0.0, id="f")])], GRPO)
    assert report.versions_per_rollout == 2.0  # three versions and one
    assert report.forks == {"edited": 1}


def test_versions_and_temperatures_stay_with_their_tokens() -> None:
    hot = turn("a", prompt=[1, 1], sampled=[2, 3], versions=[6, 7], temperature=0.7)
    samples, _ = built([group([episode([hot], 1.0), episode([turn("b")], 0.0, id="f")])], GRPO)
    assert samples[0].versions.tolist() == [-1, -1, 6, 7]
    assert samples[0].temperatures.tolist() == pytest.approx([1, 1, 0.7, 0.7])
    assert samples[0].behavior_logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2])


ESTIMATORS = [
    {},
    {"advantage_mean": "batch", "advantage_std": "batch"},
    {"leave_one_out": True, "advantage_std": "none"},
]


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(ESTIMATORS))
def test_turns_and_forks_without_a_reward_change_no_advantage(seed: int, parts: dict) -> None:
    """The second batch has the scores of the first, but its episodes have random turns, forks and roots."""
    rng = random.Random(seed)
    scores = [[rng.choice([0.0, 0.5, 1.0]) for _ in range(3)] for _ in range(2)]
    config = AlgorithmConfig(drop_equal_groups=False, **parts)
    plain = [
        group([episode([turn("a")], s, id=f"{g}-{i}") for i, s in enumerate(of)], id=f"g{g}")
        for g, of in enumerate(scores)
    ]
    grown = [
        group(
            [
                episode(random_episode(rng, turns=rng.randint(1, 9)).turns, s, id=f"{g}-{i}")
                for i, s in enumerate(of)
            ],
            id=f"g{g}",
        )
        for g, of in enumerate(scores)
    ]
    expected = {s.episode_id: s.advantages[-1] for s in build_training_data(plain, config).samples}
    for s in build_training_data(grown, config).samples:
        assert (s.advantages[s.loss_mask] == expected[s.episode_id]).all()


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_a_batch_of_random_forests_trains_each_sampled_token_once(seed: int) -> None:
    groups = random_groups(seed)
    data = build_training_data(groups, AlgorithmConfig(drop_equal_groups=False))
    trained = Counter(int(token) for s in data.samples for token in s.token_ids[s.loss_mask])
    turns = [t for g in groups for r in g.rollouts for t in r.episode.turns if not t.constrained]
    assert trained == Counter(int(token) for t in turns for token in t.completion.token_ids)
    for g in groups:
        scores = [r.episode.score for r in g.rollouts]
        assert data.group_scores[g.id].tolist() == pytest.approx(scores, abs=1e-12)
        for r in g.rollouts:
            known = data.rewards[r.episode.id]
            assert known.group_id == g.id and known.score == pytest.approx(r.episode.score, abs=1e-12)
            assert list(known.recorded_before) == [t.recorded_before for t in r.episode.turns]


def test_rewards_are_scaled_shifted_and_clipped() -> None:
    turns = [turn("a"), turn("b", "a"), turn("c", "a")]
    recorded = episode(turns, 3.0, by_turn={"a": 0.5, "b": -9.0}, by_branch={"c": 1.0})
    config = AlgorithmConfig(reward_scale=2.0, reward_bias=-1.0, reward_clip=5.0)
    data = build_training_data([group([recorded])], config)
    assert data.rewards["e"].turns.tolist() == [1.0, -5.0, 2.0]
    assert data.rewards["e"].episode == 4.0  # 2 · (3 − 1)
    assert data.group_scores["g"].tolist() == [2.0]
    assert data.report.rewards == (-4.5,)  # as recorded


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0.0), (2, 0.0), (3, -0.5), (6, -2.0), (10, -4.0)])
def test_the_length_penalty_grows_along_the_buffer(tokens: int, penalty: float) -> None:
    """The penalty is min(−(len − (8 − 4))/4 · 2, 0), where len counts the tokens of both turns."""
    turns = [turn("a", sampled=[1, 2]), turn("b", "a", sampled=[3] * tokens)]
    config = AlgorithmConfig(
        length_penalty="linear", overlong_limit=8, overlong_buffer=4, overlong_factor=2.0
    )
    data = build_training_data([group([episode(turns, 1.0)])], config)
    assert data.rewards["e"].episode == 1.0 + penalty
    assert data.report.overlong == (penalty < 0) and data.report.episode_tokens == (2 + tokens,)


def test_equal_rewards_for_answers_of_different_lengths_are_an_equal_group() -> None:
    config = AlgorithmConfig.model_validate({"preset": "dapo", "overlong_limit": 4, "overlong_buffer": 4})
    lengths = group([episode([turn("a", sampled=[1] * n)], 1.0, id=f"e{n}") for n in (1, 2, 3)])
    data = build_training_data([lengths], config)
    assert data.samples == () and data.report.equal_groups == ("g",)
    kept = build_training_data([lengths], config.model_copy(update={"drop_equal_groups": False}))
    advantages = [float(s.advantages[-1]) for s in kept.samples]
    assert advantages == sorted(advantages, reverse=True) and advantages[0] > 0


def test_scores_that_are_equal_after_clipping_are_an_equal_group() -> None:
    config = AlgorithmConfig(reward_clip=1.0)
    groups = [
        group([episode([], 2.0, id="a"), episode([], 3.0, id="b")], id="equal"),
        group([episode([], 0.5, id="c"), episode([], 3.0, id="d")], id="different"),
    ]
    assert built(groups, config)[1].equal_groups == ("equal",)


def stepwise(own: list[list[float]], *, id: str = "g") -> RolloutGroup:
    """A group of conversations whose turns were rewarded one by one."""
    return group(
        [
            episode(
                [turn(f"{i}", f"{i - 1}" if i else None) for i in range(len(rewards))],
                id=f"{id}{index}",
                by_turn={f"{i}": value for i, value in enumerate(rewards)},
            )
            for index, rewards in enumerate(own)
        ],
        id=id,
    )


@pytest.mark.parametrize(
    ("settings", "equal"),
    [
        ({}, ("score",)),  # only scores are compared
        ({"credit": "reward_to_go"}, ("score",)),  # equal scores have deviation 0, so all are 0
        ({"credit": "reward_to_go", "advantage_std": "none"}, ()),
        ({"credit": "step_normalized"}, ()),
    ],
)
def test_a_group_of_equal_scores_is_equal_only_if_all_its_advantages_are_zero(
    settings: dict, equal: tuple[str, ...]
) -> None:
    """Both episodes of the first group earned 1, one with its first turn and the other with its second."""
    groups = [stepwise([[1.0, 0.0], [0.0, 1.0]], id="score"), stepwise([[0.5, 0.5]] * 2, id="turns")]
    samples, report = built(groups, AlgorithmConfig(**settings))
    assert report.equal_groups == (*equal, "turns") and report.dropped_groups == len(equal) + 1
    assert {s.group_id for s in samples} == {"score"} - set(equal)
    if not equal and settings["credit"] == "reward_to_go":
        # at k = 0 both have 1 to go; at k = 1 the first has 0 and the second 1
        assert [s.advantages[s.loss_mask].tolist() for s in samples] == [[0, 0, -0.5, -0.5], [0, 0, 0.5, 0.5]]


def test_truncated_turns_are_masked_and_their_score_stays_in_the_baseline() -> None:
    cut = episode([turn("a")], 1.0, id="cut", status="truncated")
    groups = [group([cut, episode([turn("b")], 4.0, id="whole")])]
    kept, _ = built(groups, AlgorithmConfig(advantage_std="none"))
    assert {s.episode_id: float(s.advantages[-1]) for s in kept} == {"cut": -1.5, "whole": 1.5}
    masked, report = built(groups, AlgorithmConfig(advantage_std="none", truncated="mask"))
    assert {s.episode_id: float(s.advantages[-1]) for s in masked} == {"whole": 1.5}
    assert (report.truncated, report.sampled_tokens, report.untrained_tokens) == (1, 4, 2)
    assert report.rewards == (1.0, 4.0)


def scored(*scores: float, id: str = "g", **fields: object) -> RolloutGroup:
    return group([episode([turn("t", **fields)], s, id=f"{id}{i}") for i, s in enumerate(scores)], id=id)


@pytest.mark.parametrize(
    ("scores", "min_score", "chosen"),
    [
        ((0.0, 1.0, 0.5), None, [1]),
        ((1.0, 0.0, 1.0), None, [0, 2]),
        ((1.0, 1.0), None, []),  # both episodes may be equally bad
        ((0.2,), None, [0]),  # a demonstration
        ((0.0, 1.0, 0.5), 0.5, [1, 2]),
        ((1.0, 1.0), 0.5, [0, 1]),
        ((0.2,), 0.5, []),
    ],
)
def test_sft_trains_on_the_best_episodes(scores, min_score, chosen) -> None:  # type: ignore[no-untyped-def]
    config = AlgorithmConfig(preset="sft", sft_min_score=min_score)
    data = build_training_data([scored(*scores)], config)
    assert [s.episode_id for s in data.samples] == [f"g{place}" for place in chosen]
    assert all((s.advantages[s.loss_mask] == 1).all() for s in data.samples)


def test_supervised_training_includes_greedy_and_constrained_turns() -> None:
    greedy = scored(0.0, 1.0, temperature=0.0, constrained=True)
    (trained,) = build_training_data([greedy], AlgorithmConfig(preset="sft")).samples
    assert trained.loss_mask.tolist() == [False, False, True, True] and (trained.temperatures == 1).all()
    config = AlgorithmConfig(preset="sft", train_constrained=False)
    assert build_training_data([greedy], config).samples == ()


def test_dpo_pairs_the_best_with_the_worst() -> None:
    groups = [scored(0.5, 2.0, 2.0, -1.0, id="a"), scored(1.0, 1.0, id="b"), scored(0.0, 1.0, id="c")]
    data = build_training_data(groups, AlgorithmConfig(preset="dpo"))
    assert data.pairs == (("a1", "a3"), ("c1", "c0"))
    signs = {s.episode_id: set(s.advantages[s.loss_mask].tolist()) for s in data.samples}
    assert signs == {"a1": {1.0}, "a3": {-1.0}, "c1": {1.0}, "c0": {-1.0}}


def test_dpo_does_not_pair_an_episode_without_trained_tokens() -> None:
    aborted = episode([turn("x", finish="abort")], 9.0, id="x")
    mixed = [*(rollout.episode for rollout in scored(0.0, 1.0).rollouts), aborted]
    assert build_training_data([group(mixed)], AlgorithmConfig(preset="dpo")).pairs == (("g1", "g0"),)
    assert build_training_data([group([aborted])], AlgorithmConfig(preset="dpo")).pairs == ()


def test_samples_have_zero_advantages_before_the_critic_has_run() -> None:
    data = build_training_data([scored(0.0, 1.0)], AlgorithmConfig(preset="ppo"))
    assert len(data.samples) == 2 and all((s.advantages == 0).all() for s in data.samples)


def broken_reward(value: float) -> Reward:
    reward = Reward("episode", "", "return", 0.0)
    object.__setattr__(reward, "value", value)  # the reward's own validation refuses this
    return reward


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e39, 1.1e12])
def test_a_reward_that_is_not_finite_or_too_large_is_named_in_the_error(value: float) -> None:
    good, bad = scored(0.0, 1.0, id="good"), scored(0.0, 1.0, id="bad")
    object.__setattr__(bad.rollouts[1].episode, "rewards", (broken_reward(value),))
    with pytest.raises(
        TrainingError, match=f"group bad, episode bad1: the reward 'return' is {re.escape(str(value))}"
    ):
        build_training_data([good, bad], GRPO)


@pytest.mark.parametrize("array", ["logprobs", "versions"])
def test_a_completion_with_an_array_that_is_too_short_is_named_in_the_error(array: str) -> None:
    short = scored(0.0, 1.0)
    completion = short.rollouts[1].episode.turns[0].completion
    object.__setattr__(completion, array, getattr(completion, array)[:-1])
    with pytest.raises(TrainingError, match="group g, episode g1, turn t: 2 token ids"):
        build_training_data([short], GRPO)


def test_a_group_or_episode_that_is_in_a_batch_twice_is_named_in_the_error() -> None:
    with pytest.raises(TrainingError, match="group g: group g is in the batch twice"):
        build_training_data([scored(0.0, 1.0), scored(0.0, 1.0)], GRPO)
    with pytest.raises(TrainingError, match="group h: episode g0 is in the batch twice"):
        build_training_data([scored(0.0, 1.0), group([episode([turn("a")], 0.0, id="g0")], id="h")], GRPO)


def test_leave_one_out_needs_another_episode() -> None:
    with pytest.raises(TrainingError, match="group g has one episode"):
        build_training_data([scored(1.0)], AlgorithmConfig(preset="rloo"))


def test_a_batch_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        build_training_data([], GRPO)
