"""Credit per token, compared with the textbook recursion, direct sums, and the formulas of the papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from algorithms_support import defined_depths, episode, group, random_groups, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.returns import RewardToGo
from areal_agents.algorithms.credit.rewards import EpisodeRewards
from areal_agents.algorithms.credit.tokens import gae, penalties_to_go, token_advantages
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.algorithms.staleness import mask_stale
from areal_agents.errors import TrainingError

forests = given(st.integers(0, 10**6))
few = settings(derandomize=True, deadline=None, max_examples=40)

RAW = {"preset": "ppo", "advantage_mean": "none", "advantage_std": "none"}


def ppo(**fields: object) -> AlgorithmConfig:
    """PPO with a critic, without whitening of advantages."""
    return AlgorithmConfig.model_validate({**RAW, **fields})


def per_token(data: TrainingData, number: Callable[[int], float]) -> list[np.ndarray]:
    """Per sample, the value of `number` for the id of each trained token; the ids are unique."""
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


def following(rewards: EpisodeRewards) -> np.ndarray:
    """[T] the sum of the rewards of each turn and of all turns recorded after it, and the episode reward."""
    return rewards.turns[::-1].cumsum()[::-1] + rewards.episode


def own_rewards(rewards: EpisodeRewards) -> list[float]:
    """The reward of each turn in recording order; that of the last turn includes the episode reward."""
    return [
        float(own) + (rewards.episode if place == len(rewards.turns) - 1 else 0.0)
        for place, own in enumerate(rewards.turns)
    ]


def brute_force(
    rewards: EpisodeRewards,
    values: dict[int, list[float]],
    costs: dict[int, list[float]],
    *,
    discount: float,
    decay: float,
    level: str,
) -> dict[int, list[float]]:
    """GAE by its definition: Σ_l (γλ)^l δ_{i+l} over the states of an episode in recording order.

    At level "token" the states are the trained tokens. The reward of a turn without trained tokens is
    received after the last trained token before it. At level "turn" every turn is a state. The value of an
    untrained turn is its reward plus the discounted value of the next turn, so its δ is 0.
    """
    places: list[int] = []  # the turn of each state
    step_rewards: list[float] = []
    later: list[float] = []  # rewards between a state and the next one
    known: list[float | None] = []
    for place, own in enumerate(own_rewards(rewards)):
        if level == "turn":
            places.append(place)
            known.append(values[place][0] if place in values else None)
            step_rewards.append(own - sum(costs.get(place, [])))
            later.append(0.0)
        elif place in values:
            places += [place] * len(values[place])
            known += values[place]
            step_rewards += [-cost for cost in costs[place]]
            step_rewards[-1] += own
            later += [0.0] * len(values[place])
        elif later:
            later[-1] += own
    n = len(places)
    worth = [0.0] * (n + 1)
    for i in reversed(range(n)):
        own_value = known[i]
        worth[i] = step_rewards[i] + discount * worth[i + 1] if own_value is None else own_value
    deltas = [step_rewards[i] + discount * (later[i] + worth[i + 1]) - worth[i] for i in range(n)]
    out: dict[int, list[float]] = {place: [] for place in values}
    for i, place in enumerate(places):
        if place in values:
            total = sum((discount * decay) ** (j - i) * deltas[j] for j in range(i, n))
            out[place] += [total] * (len(values[place]) if level == "turn" else 1)
    return out


@pytest.mark.parametrize("level", ["token", "turn"])
@few
@forests
def test_gae_equals_its_definition_in_recording_order(level: str, seed: int) -> None:
    """The episodes have several roots and branches, and their calls overlap."""
    data = build_training_data(random_groups(seed, groups=1), ppo())
    rng = np.random.default_rng(seed)
    discount, decay = rng.uniform(0.5, 1, 2)
    for episode_id, rewards in data.rewards.items():
        values = by_turn(data, episode_id, random_numbers(data, seed))
        costs = by_turn(data, episode_id, random_numbers(data, seed + 1))
        expected = brute_force(rewards, values, costs, discount=discount, decay=decay, level=level)
        arrays = [{t: np.array(x) for t, x in numbers.items()} for numbers in (values, costs)]
        got, targets = gae(
            rewards, values=arrays[0], costs=arrays[1], discount=discount, decay=decay, level=level
        )  # type: ignore[arg-type]
        assert got.keys() == expected.keys()
        for place in got:
            assert got[place].tolist() == pytest.approx(expected[place], abs=1e-9)
            before = values[place][:1] if level == "turn" else values[place]
            assert targets[place].tolist() == pytest.approx((got[place] + before).tolist())


def test_gae_of_two_interleaved_conversations_by_hand() -> None:
    """The turns were recorded in the order a, x, b, y: x follows a although it is on another root, and the
    episode reward is received once, with y."""
    turns = [
        turn("a", prompt=[1], sampled=[2]), turn("x", prompt=[3], sampled=[4], recorded_before=1),
        turn("b", "a", prompt=[5], sampled=[6]), turn("y", "x", prompt=[7], sampled=[8], recorded_before=3),
    ]  # fmt: skip
    config = ppo(gae_discount=0.9, gae_lambda=0.5)
    data = build_training_data([group([episode(turns, 2.0, by_turn={"x": 1.0})])], config)
    known = {2: 0.1, 4: 0.2, 6: 0.3, 8: 0.4}
    made = token_advantages(data, values=per_token(data, known.__getitem__), penalties=None, config=config)
    got = {
        int(i): float(a)
        for s, array in zip(data.samples, made.advantages, strict=True)
        for i, a in zip(s.token_ids[s.loss_mask], array, strict=True)
    }
    y = 2.0 - 0.4
    b = 0.9 * 0.4 - 0.3 + 0.45 * y
    x = 1.0 + 0.9 * 0.3 - 0.2 + 0.45 * b
    a = 0.9 * 0.2 - 0.1 + 0.45 * x
    assert got == pytest.approx({2: a, 4: x, 6: b, 8: y}, rel=1e-6)


def textbook(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """A_t = δ_t + γλ A_{t+1}, computed backwards along a chain; the value after its end is 0."""
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
def test_gae_without_discount_and_values_is_the_sum_of_the_rewards_from_the_turn_on(
    level: str, seed: int
) -> None:
    config = ppo(gae_level=level)
    data = build_training_data(random_groups(seed), config)
    made = token_advantages(data, values=per_token(data, lambda _: 0.0), penalties=None, config=config)
    for s, advantages in zip(data.samples, made.advantages, strict=True):
        sums = following(data.rewards[s.episode_id])
        assert advantages.tolist() == pytest.approx(sums[s.turn_index[s.loss_mask]].tolist(), abs=1e-5)


@few
@forests
def test_gae_per_turn_discounts_rewards_of_turns_as_rewards_to_go_do(seed: int) -> None:
    """There is no episode reward, and the calls follow one another, so each turn is one level deeper."""
    config = ppo(gae_level="turn", gae_discount=0.6)
    data = build_training_data(random_groups(seed), config)
    bare = {
        i: replace(known, episode=0.0, recorded_before=tuple(range(len(known.turns))))
        for i, known in data.rewards.items()
    }
    data = replace(data, rewards=bare)
    made = token_advantages(data, values=per_token(data, lambda _: 0.0), penalties=None, config=config)
    for s, advantages in zip(data.samples, made.advantages, strict=True):
        rewards = bare[s.episode_id]
        returns = RewardToGo(turn_discount=0.6).after(rewards, rewards.recorded_before)
        assert advantages.tolist() == pytest.approx(returns[s.turn_index[s.loss_mask]].tolist(), abs=1e-5)


@pytest.mark.parametrize("level", ["token", "turn"])
@few
@forests
def test_advantages_are_zero_if_the_critic_predicts_every_return(level: str, seed: int) -> None:
    config = ppo(gae_level=level, gae_lambda=0.8)
    data = build_training_data(random_groups(seed), config)
    values = [following(data.rewards[s.episode_id])[s.turn_index[s.loss_mask]] for s in data.samples]
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


def test_reinforce_plus_plus_equals_its_formulas() -> None:
    """arXiv 2501.03262, eq. 8: A_t = r − β Σ_{i ≥ t} KL(i); eq. 10: less the mean of the batch, divided by
    its deviation. Here every episode counts once in both, whatever its length."""
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
        {"advantage_mean": "batch", "advantage_std": "batch", "credit": "reward_to_go", "turn_discount": 0.5},
        {"leave_one_out": True, "advantage_std": "none", "drop_equal_groups": False},
    ],
)
@few
@forests
def test_a_penalty_of_zero_does_not_change_advantages(parts: dict, seed: int) -> None:
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
def test_penalties_to_go_are_the_discounted_sum_over_later_tokens(seed: int) -> None:
    """The sum is over the rest of the turn and over the turns recorded after it, each discounted by its
    additional depth. A turn recorded before this one cannot have been caused by it."""
    groups = random_groups(seed)
    episodes = {r.episode.id: r.episode for g in groups for r in g.rollouts}
    config = AlgorithmConfig(
        advantage_mean="none", advantage_std="none", credit="reward_to_go", turn_discount=0.7,
        drop_equal_groups=False, kl_in="reward", kl_coefficient=2.0,
    )  # fmt: skip
    data = build_training_data(groups, config)
    kl = random_numbers(data, seed)
    made = token_advantages(data, values=None, penalties=kl, config=config)
    for episode_id, recorded in episodes.items():
        rewards, depths = data.rewards[episode_id], defined_depths(recorded)
        charged = by_turn(data, episode_id, kl)
        returns = RewardToGo(turn_discount=0.7).after(rewards, rewards.recorded_before)
        got = by_turn(data, episode_id, made.advantages)
        direct = penalties_to_go(
            rewards, {t: np.array(costs) for t, costs in charged.items()}, turn_discount=0.7
        )
        for place, costs in charged.items():
            after = sum(
                0.7 ** max(0, depths[u] - depths[place]) * sum(charged[u]) for u in charged if u > place
            )
            paid = [sum(costs[i:]) + after for i in range(len(costs))]
            assert direct[place].tolist() == pytest.approx(paid, abs=1e-9)
            expected = [returns[place] - 2.0 * each for each in paid]
            assert got[place] == pytest.approx(expected, abs=1e-4)


def token_statistics(**fields: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"advantage_statistics": "token", "drop_equal_groups": False, **fields}
    )


def test_statistics_over_tokens_count_a_long_episode_more() -> None:
    """Score 0 with three tokens and score 1 with one token have mean 1/4 and variance 3/16 · 4/3."""
    groups = [
        group([episode([turn("a", sampled=[1, 2, 3])], 0.0), episode([turn("b", sampled=[4])], 1.0, id="f")])
    ]
    config = token_statistics()
    data = build_training_data(groups, config)
    assert config.needs_token_credit and all((s.advantages == 0).all() for s in data.samples)
    made = token_advantages(data, values=None, penalties=None, config=config)
    assert made.advantages[0].tolist() == pytest.approx([-0.25 / (0.5 + 1e-5)] * 3)
    assert made.advantages[1].tolist() == pytest.approx([0.75 / (0.5 + 1e-5)]) and made.value_targets is None
    centred = token_statistics(advantage_std="none")
    plain = token_advantages(data, values=None, penalties=None, config=centred)
    assert [a.tolist() for a in plain.advantages] == [[-0.25] * 3, [0.75]]


@pytest.mark.parametrize("where", ["group", "batch"])
@pytest.mark.parametrize("credit", ["episode", "reward_to_go"])
@few
@forests
def test_statistics_over_tokens_equal_equation_10(where: str, credit: str, seed: int) -> None:
    """arXiv 2501.03262: A_t = return − β Σ_{i ≥ t} KL(i), less the mean, divided by the deviation."""
    config = token_statistics(
        advantage_mean=where, advantage_std=where, credit=credit, kl_in="reward", kl_coefficient=0.1
    )
    data = build_training_data(random_groups(seed), config)
    kl = random_numbers(data, seed)
    got = token_advantages(data, values=None, penalties=kl, config=config)
    raw = []
    for s, own in zip(data.samples, kl, strict=True):
        rewards = data.rewards[s.episode_id]
        charged = by_turn(data, s.episode_id, kl)
        assert config.estimator.kind == "group"
        returns = config.estimator.credit.after(rewards, rewards.recorded_before)  # type: ignore[union-attr]
        turns = s.turn_index[s.loss_mask]
        rest = [
            sum(own[i:][turns[i:] == turns[i]]) + sum(sum(charged[u]) for u in charged if u > turns[i])
            for i in range(len(own))
        ]
        raw.append([returns[t] - 0.1 * each for t, each in zip(turns, rest, strict=True)])
    for s, advantages, values in zip(data.samples, got.advantages, raw, strict=True):
        pool = [
            value
            for other, of_other in zip(data.samples, raw, strict=True)
            if where == "batch" or other.group_id == s.group_id
            for value in of_other
        ]
        if np.ptp(pool) < 1e-9:
            continue
        deviation = np.std(pool, ddof=1) if len(pool) > 1 else 0.0
        expected = [(value - np.mean(pool)) / (deviation + 1e-5) for value in values]
        assert advantages.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_token_that_another_sample_trains_is_scored_but_has_no_advantage() -> None:
    """GSPO scores the shared turn in both branches; in the second branch its tokens are not states."""
    turns = [
        turn("a", prompt=[1], sampled=[2, 3]), turn("b", "a", prompt=[4], sampled=[5]),
        turn("c", "a", prompt=[6], sampled=[7]),
    ]  # fmt: skip
    forked = [group([episode(turns, 2.0, by_turn={"b": 1.0})])]
    plain, by_path = ppo(), ppo(policy_loss="gspo")
    known = {2: 0.3, 3: -0.2, 5: 0.5, 7: 0.9}
    alone = build_training_data(forked, plain)
    shared = build_training_data(forked, by_path)
    expected = token_advantages(
        alone, values=per_token(alone, known.__getitem__), penalties=None, config=plain
    )
    values = [np.array([known[int(i)] for i in s.token_ids[s.scored_mask]]) for s in shared.samples]
    assert [len(v) for v in values] == [3, 3]
    got = token_advantages(shared, values=values, penalties=None, config=by_path)
    assert expected.value_targets is not None and got.value_targets is not None
    for mine, theirs in ((got.advantages, expected.advantages), (got.value_targets, expected.value_targets)):
        assert mine[0].tolist() == theirs[0].tolist()
        assert mine[1].tolist() == [0.0, 0.0, *theirs[1].tolist()]


def test_stale_tokens_are_not_states() -> None:
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
    middle = 0.9 * (1.0 + 0.7) - 0.2 + 0.45 * last  # the reward of b is received before c
    expected = [0.9 * 0.2 - 0.3 + 0.45 * middle, middle, last]
    assert made.advantages[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_trained_tokens_is_no_error() -> None:
    data = build_training_data([group([episode([], 1.0), episode([], 0.0, id="f")])], ppo())
    made = token_advantages(data, values=[], penalties=None, config=ppo())
    assert made.advantages == [] and made.value_targets == []


def test_missing_or_unused_values_and_penalties_are_refused() -> None:
    data = build_training_data([group([episode(CHAIN, 1.0)])], ppo())
    zeros = per_token(data, lambda _: 0.0)
    with pytest.raises(ValueError, match="values are required, got None"):
        token_advantages(data, values=None, penalties=None, config=ppo())
    with pytest.raises(ValueError, match="penalties must be None, because they are not used"):
        token_advantages(data, values=zeros, penalties=zeros, config=ppo())
    with pytest.raises(ValueError, match="values must have one array per sample, 1, got 0"):
        token_advantages(data, values=[], penalties=None, config=ppo())


@pytest.mark.parametrize("bad", [np.zeros(5), np.array([0, 0, np.nan, 0, 0, 0])])
def test_values_that_are_too_few_or_not_finite_are_named_in_the_error(bad: np.ndarray) -> None:
    data = build_training_data([group([episode(CHAIN, 1.0)])], ppo())
    with pytest.raises(TrainingError, match="group g, episode e: values .* 6 scored tokens, .* 5 finite"):
        token_advantages(data, values=[bad], penalties=None, config=ppo())
