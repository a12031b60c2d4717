"""Credit per token against the textbook recursion, sums over every path, and the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from algorithms_support import episode, group, random_groups, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.returns import EpisodeCredit, turn_returns
from areal_agents.algorithms.credit.tokens import gae, token_advantages
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.algorithms.staleness import mask_stale
from areal_agents.errors import TrainingError

forests = given(st.integers(0, 10**6))
few = settings(derandomize=True, deadline=None, max_examples=40)

RAW = {"preset": "ppo", "advantage_mean": "none", "advantage_std": "none"}


def ppo(**fields: object) -> AlgorithmConfig:
    """PPO with a critic, its advantages not whitened."""
    return AlgorithmConfig.model_validate({**RAW, **fields})


def per_token(data: TrainingData, number: Callable[[int], float]) -> list[np.ndarray]:
    """Per sample, the number of each of its trained tokens, which have ids of their own."""
    return [np.array([number(int(i)) for i in s.token_ids[s.loss_mask]]) for s in data.samples]


def random_numbers(data: TrainingData, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=int(s.loss_mask.sum())) for s in data.samples]


def by_turn(data: TrainingData, episode_id: str, arrays: list[np.ndarray]) -> dict[int, list[float]]:
    """The numbers of the trained tokens of an episode, by turn."""
    found: dict[int, list[float]] = {}
    for s, array in zip(data.samples, arrays, strict=True):
        if s.episode_id == episode_id:
            for place, value in zip(s.turn_index[s.loss_mask], array, strict=True):
                found.setdefault(int(place), []).append(float(value))
    return found


def paths_through(credit: EpisodeCredit, start: int) -> list[tuple[float, list[int]]]:
    """Every path of turns from `start` down to a leaf, with the chance that a walk takes it."""
    following = [turn for turn, parent in enumerate(credit.parents) if parent == start]
    if not following:
        return [(1.0, [start])]
    return [
        (chance / len(following), [start, *path])
        for child in following
        for chance, path in paths_through(credit, child)
    ]


def brute_force(
    credit: EpisodeCredit,
    values: dict[int, list[float]],
    costs: dict[int, list[float]],
    *,
    discount: float,
    decay: float,
) -> dict[int, list[float]]:
    """Token-level GAE as its definition says: Σ_l (γλ)^l δ_{i+l}, on every path, averaged over the paths.

    On one path the states are the trained tokens; the rewards of turns that have none come with the last
    token before them, as part of what follows it.
    """
    out = {}
    for start in values:
        total = np.zeros(len(values[start]))
        for chance, path in paths_through(credit, start):
            rewards: list[float] = []
            later: list[float] = []  # rewards that come after a token, before the next one
            known: list[float] = []
            for place in path:
                own = credit.rewards[place] + (credit.episode_reward if place == path[-1] else 0.0)
                if place in values:
                    rewards += [-cost for cost in costs[place]]
                    later += [0.0] * len(values[place])
                    known += values[place]
                    rewards[-1] += own
                else:
                    later[-1] += own
            known.append(0.0)
            n = len(rewards)
            deltas = [rewards[i] + discount * (later[i] + known[i + 1]) - known[i] for i in range(n)]
            sums = [sum((discount * decay) ** (j - i) * deltas[j] for j in range(i, n)) for i in range(n)]
            total += chance * np.array(sums[: len(total)])
        out[start] = total.tolist()
    return out


@few
@forests
def test_gae_on_forests_is_the_mean_over_every_path(seed: int) -> None:
    data = build_training_data(random_groups(seed, groups=1), ppo())
    rng = np.random.default_rng(seed)
    discount, decay = rng.uniform(0.5, 1, 2)
    for episode_id, credit in data.credit.items():
        values = by_turn(data, episode_id, random_numbers(data, seed))
        costs = by_turn(data, episode_id, random_numbers(data, seed + 1))
        expected = brute_force(credit, values, costs, discount=discount, decay=decay)
        arrays = [{t: np.array(x) for t, x in numbers.items()} for numbers in (values, costs)]
        got, targets = gae(
            credit, values=arrays[0], costs=arrays[1], discount=discount, decay=decay, level="token"
        )
        assert got.keys() == expected.keys()
        for place in got:
            assert got[place].tolist() == pytest.approx(expected[place], abs=1e-9)
            assert targets[place].tolist() == pytest.approx((got[place] + values[place]).tolist())


def textbook(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """A_t = δ_t + γλ A_{t+1} backwards along one chain, V after the end 0."""
    advantages, after, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        after = reward + discount * next_value - value + discount * decay * after
        next_value = value
        advantages.append(after)
    return advantages[::-1]


CHAIN = [
    turn("a", prompt=[1], sampled=[2, 3, 4]),
    turn("b", "a", prompt=[5], sampled=[6, 7]),
    turn("c", "b", prompt=[8, 9], sampled=[10]),
]


def test_gae_per_token_on_a_chain() -> None:
    data = build_training_data([group([episode(CHAIN, 2.0, by_turn={"a": 0.5, "b": -1.0})])], ppo())
    values, costs = [0.1, 0.4, -0.2, 0.3, 0.9, 0.6], [0.2, 0.0, 0.1, -0.1, 0.3, 0.4]
    config = ppo(gae_discount=0.9, gae_lambda=0.7, kl_in="reward", kl_coefficient=0.5)
    made = token_advantages(data, values=[np.array(values)], penalties=[np.array(costs)], config=config)
    rewards = [-0.5 * cost for cost in costs]
    rewards[2] += 0.5
    rewards[4] += -1.0
    rewards[5] += 2.0
    expected = textbook(rewards, values, 0.9, 0.7)
    assert made.advantages[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert made.value_targets is not None
    assert made.value_targets[0].tolist() == pytest.approx(np.add(expected, values).tolist(), rel=1e-6)


def test_gae_per_turn_on_a_chain() -> None:
    data = build_training_data([group([episode(CHAIN, 2.0, by_turn={"a": 0.5, "b": -1.0})])], ppo())
    values, costs = [0.1, 9.0, 9.0, 0.3, 9.0, 0.6], [0.2, 0.0, 0.1, -0.1, 0.3, 0.4]
    config = ppo(gae_level="turn", gae_discount=0.9, gae_lambda=0.7, kl_in="reward", kl_coefficient=0.5)
    made = token_advantages(data, values=[np.array(values)], penalties=[np.array(costs)], config=config)
    rewards = [0.5 - 0.5 * 0.3, -1.0 - 0.5 * 0.2, 2.0 - 0.5 * 0.4]
    first, second, third = textbook(rewards, [0.1, 0.3, 0.6], 0.9, 0.7)
    assert made.advantages[0].tolist() == pytest.approx([first] * 3 + [second] * 2 + [third], rel=1e-6)
    assert made.value_targets is not None
    expected = [first + 0.1] * 3 + [second + 0.3] * 2 + [third + 0.6]
    assert made.value_targets[0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "turn"])
@few
@forests
def test_without_discount_and_values_it_is_the_return_of_the_turn(level: str, seed: int) -> None:
    config = ppo(gae_level=level)
    data = build_training_data(random_groups(seed), config)
    made = token_advantages(data, values=per_token(data, lambda _: 0.0), penalties=None, config=config)
    for s, advantages in zip(data.samples, made.advantages, strict=True):
        returns = turn_returns(data.credit[s.episode_id])
        assert advantages.tolist() == pytest.approx(returns[s.turn_index[s.loss_mask]].tolist(), abs=1e-5)


@few
@forests
def test_per_turn_the_discount_is_that_of_turn_returns_but_for_the_episode_reward(seed: int) -> None:
    config = ppo(gae_level="turn", gae_discount=0.6)
    data = build_training_data(random_groups(seed), config)
    bare = {i: replace(credit, episode_reward=0.0) for i, credit in data.credit.items()}
    data = replace(data, credit=bare)
    made = token_advantages(data, values=per_token(data, lambda _: 0.0), penalties=None, config=config)
    for s, advantages in zip(data.samples, made.advantages, strict=True):
        returns = turn_returns(bare[s.episode_id], turn_discount=0.6)
        assert advantages.tolist() == pytest.approx(returns[s.turn_index[s.loss_mask]].tolist(), abs=1e-5)


@pytest.mark.parametrize("level", ["token", "turn"])
@few
@forests
def test_a_critic_that_knows_the_returns_leaves_no_advantage(level: str, seed: int) -> None:
    config = ppo(gae_level=level, gae_lambda=0.8)
    data = build_training_data(random_groups(seed), config)
    values = [turn_returns(data.credit[s.episode_id])[s.turn_index[s.loss_mask]] for s in data.samples]
    made = token_advantages(data, values=values, penalties=None, config=config)
    for advantages in made.advantages:
        assert advantages.tolist() == pytest.approx([0.0] * len(advantages), abs=1e-5)


def test_advantages_are_whitened_over_the_tokens_of_the_batch_and_targets_are_not() -> None:
    data = build_training_data(random_groups(3), ppo())
    values = random_numbers(data, 5)
    plain = token_advantages(data, values=values, penalties=None, config=ppo())
    white = token_advantages(data, values=values, penalties=None, config=AlgorithmConfig(preset="ppo"))
    flat = np.concatenate(plain.advantages).astype(np.float64)
    expected = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-5)
    assert np.concatenate(white.advantages) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert white.value_targets is not None and plain.value_targets is not None
    for got, wanted in zip(white.value_targets, plain.value_targets, strict=True):
        assert got.tolist() == wanted.tolist()


def test_reinforce_plus_plus_by_its_formulas() -> None:
    """arXiv 2501.03262 eq. 8: A_t = r − β Σ_{i ≥ t} KL(i); eq. 10: less the mean, over the deviation, of
    the batch, in which here every episode counts once, however long."""
    rewards, lengths, beta = [[1.0, 0.0], [0.5, 2.0]], [[3, 1], [2, 5]], 0.1
    config = AlgorithmConfig(preset="reinforce_pp", kl_coefficient=beta)
    groups = [
        group(
            [
                episode([turn("t", sampled=list(range(n)))], r, id=f"{g}{i}")
                for i, (r, n) in enumerate(zip(of_rewards, of_lengths, strict=True))
            ],
            id=f"g{g}",
        )
        for g, (of_rewards, of_lengths) in enumerate(zip(rewards, lengths, strict=True))
    ]
    data = build_training_data(groups, config)
    kl = random_numbers(data, 11)
    got = token_advantages(data, values=None, penalties=kl, config=config)
    flat_rewards = [r for of_group in rewards for r in of_group]
    raw = [
        [r - beta * sum(k[i] for i in range(t, len(k))) for t in range(len(k))]
        for r, k in zip(flat_rewards, kl, strict=True)
    ]
    means = [sum(values) / len(values) for values in raw]
    mean = sum(means) / len(means)
    std = (sum((m - mean) ** 2 for m in means) / (len(means) - 1)) ** 0.5
    assert got.value_targets is None
    for advantages, values in zip(got.advantages, raw, strict=True):
        expected = [(value - mean) / (std + 1e-5) for value in values]
        assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"advantage_mean": "batch", "advantage_std": "batch", "turn_discount": 0.5},
        {"leave_one_out": True, "advantage_std": "none", "drop_equal_groups": False},
    ],
)
@few
@forests
def test_a_penalty_of_zero_leaves_the_advantages_of_the_group(parts: dict, seed: int) -> None:
    groups = random_groups(seed)
    plain = build_training_data(groups, AlgorithmConfig(**parts))
    config = AlgorithmConfig(**parts, kl_in="reward", kl_coefficient=0.3)
    data = build_training_data(groups, config)
    made = token_advantages(data, values=None, penalties=per_token(data, lambda _: 0.0), config=config)
    known = token_advantages(plain, values=None, penalties=None, config=AlgorithmConfig(**parts))
    for got, expected in zip(made.advantages, known.advantages, strict=True):
        assert got.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)


@few
@forests
def test_penalties_flow_up_as_rewards_of_turns_do(seed: int) -> None:
    """Charged at a turn's first token, a penalty is a negative reward of the turn, to that token."""
    config = AlgorithmConfig(
        advantage_mean="none", advantage_std="none", turn_discount=0.7, drop_equal_groups=False,
        kl_in="reward", kl_coefficient=2.0,
    )  # fmt: skip
    data = build_training_data(random_groups(seed), config)
    firsts, penalties = [], []
    for s in data.samples:
        turns = s.turn_index[s.loss_mask]
        first = np.diff(turns, prepend=-1) != 0
        firsts.append(first)
        penalties.append(np.where(first, np.cos(turns + len(s.episode_id)), 0.0))
    made = token_advantages(data, values=None, penalties=penalties, config=config)
    for s, got, first in zip(data.samples, made.advantages, firsts, strict=True):
        credit = data.credit[s.episode_id]
        charged = by_turn(data, s.episode_id, penalties)
        own = credit.rewards - 2.0 * np.array([sum(charged.get(t, [])) for t in range(len(credit.parents))])
        expected = turn_returns(replace(credit, rewards=own), turn_discount=0.7)
        turns = s.turn_index[s.loss_mask][first]
        assert got[first].tolist() == pytest.approx(expected[turns].tolist(), abs=1e-5)


def test_stale_tokens_are_no_states() -> None:
    turns = [
        turn("a", prompt=[1], sampled=[2, 3, 4], versions=[0, 1, 1]),
        turn("b", "a", prompt=[5], sampled=[6], versions=[0]),
        turn("c", "b", prompt=[7], sampled=[8], versions=[1]),
    ]
    config = ppo(gae_discount=0.9, gae_lambda=0.5)
    data = build_training_data([group([episode(turns, 2.0, by_turn={"b": 1.0})])], config)
    samples, _ = mask_stale(data.samples, version=1, max_staleness=0)
    values = [0.3, 0.2, 0.7]
    made = token_advantages(
        replace(data, samples=tuple(samples)), values=[np.array(values)], penalties=None, config=config
    )
    last = 2.0 - 0.7
    middle = 0.9 * (1.0 + 0.7) - 0.2 + 0.45 * last  # b's reward comes on the way to c
    expected = [0.9 * 0.2 - 0.3 + 0.45 * middle, middle, last]
    assert made.advantages[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_nothing_to_train_is_no_error() -> None:
    data = build_training_data([group([episode([], 1.0), episode([], 0.0, id="f")])], ppo())
    made = token_advantages(data, values=[], penalties=None, config=ppo())
    assert made.advantages == [] and made.value_targets == []


def test_what_is_missing_or_has_no_use_is_refused() -> None:
    data = build_training_data([group([episode(CHAIN, 1.0)])], ppo())
    zeros = per_token(data, lambda _: 0.0)
    with pytest.raises(ValueError, match="values are missing"):
        token_advantages(data, values=None, penalties=None, config=ppo())
    with pytest.raises(ValueError, match="penalties have no use"):
        token_advantages(data, values=zeros, penalties=zeros, config=ppo())
    with pytest.raises(ValueError, match="values of 0 samples, expected those of 1"):
        token_advantages(data, values=[], penalties=None, config=ppo())


@pytest.mark.parametrize("bad", [np.zeros(5), np.array([0, 0, np.nan, 0, 0, 0])])
def test_a_number_too_few_or_not_finite_is_named(bad: np.ndarray) -> None:
    data = build_training_data([group([episode(CHAIN, 1.0)])], ppo())
    with pytest.raises(TrainingError, match="group g, episode e: values .* 5 of them finite, for 6 trained"):
        token_advantages(data, values=[bad], penalties=None, config=ppo())
