"""Observations (ECHO, arXiv 2605.24517): which tokens they are, their weights, and what ignores them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from algorithms_support import episode, group, random_groups, sample, turn
from pydantic import ValidationError

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.tokens import token_advantages
from areal_agents.algorithms.demonstrations import with_demonstrations
from areal_agents.algorithms.losses.normalization import loss_weights
from areal_agents.algorithms.losses.observation import observation_loss, observation_weights
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.samples import build_training_data, episode_samples
from areal_agents.algorithms.staleness import mask_stale
from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.sample import ImageInput, TrainingSample


def config(**given: Any) -> AlgorithmConfig:
    fields = {"observation_coefficient": 0.05, "drop_equal_groups": False, **given}
    return AlgorithmConfig.model_validate(fields)


def leading(trained: RecordedEpisode, rule: AlgorithmConfig) -> set[str]:
    """The ids of the turns on a path from a root to a trained token."""
    by_id = {t.id: t for t in trained.turns}
    found = set()
    for last in rule.trained_turns.of(trained):
        at = last if len(last.completion) else None
        while at is not None:
            found.add(at.id)
            at = by_id[at.parent] if at.parent else None
    return found


@pytest.mark.parametrize("labels", [(), ("side",)])
@pytest.mark.parametrize("seed", range(10))
def test_every_observation_that_leads_to_a_trained_token_is_included_once(seed: int, labels: Any) -> None:
    """All tokens of these episodes have different ids."""
    algorithm = config(exclude_labels=labels)
    rng = np.random.default_rng(seed)
    for made in random_groups(seed):
        for rollout in made.rollouts:
            turns = tuple(
                replace(t, label="side" if rng.random() < 0.4 else "") for t in rollout.episode.turns
            )
            played = replace(rollout.episode, turns=turns)
            samples = episode_samples(played, np.ones(len(turns)), group_id="g", config=algorithm)
            taken = Counter(int(t) for s in samples for t in s.token_ids[s.observed])
            ways = leading(played, algorithm)
            wanted = [int(i) for t in turns if t.parent and t.id in ways for i in t.new_prompt_ids]
            assert taken == Counter(wanted)
            plain = episode_samples(played, np.ones(len(turns)), group_id="g", config=AlgorithmConfig())
            if not labels:
                for with_them, without in zip(samples, plain, strict=True):
                    assert (with_them.policy_mask == without.scored_mask).all()
                    assert (with_them.token_ids == without.token_ids).all()


def branching() -> RecordedEpisode:
    """Turn a (10 | 11 12) is continued by b (20 21 | 22), and b by c (30 | 31) and d (40 | 41)."""
    return episode(
        [
            turn("a", prompt=[10], sampled=[11, 12]),
            turn("b", "a", prompt=[20, 21], sampled=[22]),
            turn("c", "b", prompt=[30], sampled=[31]),
            turn("d", "b", prompt=[40], sampled=[41], temperature=0.5),
        ],
        1.0,
    )


def test_observations_of_a_branching_episode_by_hand() -> None:
    first, second = episode_samples(branching(), np.ones(4), group_id="g", config=config())
    assert first.token_ids.tolist() == [10, 11, 12, 20, 21, 22, 30, 31]
    assert first.token_ids[first.observed].tolist() == [20, 21, 30]  # not the prompt of the root
    assert second.token_ids[second.observed].tolist() == [40]  # those of b are in the first sample
    assert second.temperatures[second.observed].tolist() == [1.0]
    assert (second.versions[second.observed] == -1).all()
    assert second.advantages[second.observed].tolist() == [0]
    assert first.scored_mask.sum() == 7 and first.policy_mask.sum() == 4
    for made in episode_samples(branching(), np.ones(4), group_id="g", config=AlgorithmConfig()):
        assert made.observation_mask is None and not made.observed.any()


def test_observation_weights_give_a_mean_and_are_zero_at_tokens_of_the_policy() -> None:
    samples = episode_samples(branching(), np.ones(4), group_id="g", config=config())
    weights = observation_weights(samples)
    assert [len(w) for w in weights] == [int(s.scored_mask.sum()) for s in samples]
    assert sum(float(w.sum()) for w in weights) == pytest.approx(1)
    assert weights[1].tolist() == pytest.approx([0.25, 0])  # 40 is observed, 41 sampled
    for made, observed, policy in zip(samples, weights, loss_weights(samples, mode="token"), strict=True):
        trained = made.loss_mask[made.scored_mask]
        assert (policy > 0).tolist() == trained.tolist() == (observed == 0).tolist()
    logprobs = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    loss = observation_loss(logprobs, torch.tensor([0.25, 0.5]))
    loss.backward()
    assert loss.item() == 1.75 and logprobs.grad is not None and logprobs.grad.tolist() == [-0.25, -0.5]
    assert [w.tolist() for w in observation_weights([sample([9, 1, 2], [1, 2])])] == [[0, 0]]


def test_packing_distinguishes_observations_from_trained_tokens() -> None:
    samples = episode_samples(branching(), np.ones(4), group_id="g", config=config())
    for share in (True, False):
        (batch,) = pack(samples, token_budget=100, share_prefixes=share)
        assert batch.observed is not None
        assert sorted(batch.target_ids[batch.observed].tolist()) == [20, 21, 30, 40]
        assert sorted(batch.target_ids[batch.trained].tolist()) == [11, 12, 22, 31, 41]
        predicted = batch.input_ids[batch.predictor_rows[batch.observed]].tolist()
        pairs = dict(zip(batch.target_ids[batch.observed].tolist(), predicted, strict=True))
        assert pairs == {20: 12, 21: 20, 30: 22, 40: 22}
    plain = episode_samples(branching(), np.ones(4), group_id="g", config=AlgorithmConfig())
    assert pack(plain, token_budget=100)[0].observed is None


def with_observations(made: TrainingSample, at: list[int]) -> TrainingSample:
    mask = np.zeros(len(made), bool)
    mask[at] = True
    return replace(made, observation_mask=mask)


def test_the_bound_on_staleness_does_not_apply_to_observations() -> None:
    made = with_observations(sample([9, 1, 2, 3, 4, 5], [1, 3, 5], versions=[-1, 5, -1, 5, -1, 2]), [2, 4])
    (kept,), report = mask_stale([made], version=5, max_staleness=0)
    assert report.masked_tokens == 1 and report.staleness.tolist() == [0, 0]
    assert np.flatnonzero(kept.loss_mask).tolist() == [1, 3]
    assert np.flatnonzero(kept.observed).tolist() == [2]  # the observation at 4 led only to the stale token
    pack([kept], token_budget=8)
    (same,), _ = mask_stale([made], version=5, max_staleness=3)
    assert same is made
    assert mask_stale([made], version=9, max_staleness=0)[0] == []


@pytest.mark.parametrize("given", [{"preset": "ppo"}, {"preset": "reinforce_pp"}, {"preset": "lite_ppo"}])
def test_observations_do_not_change_the_credit_of_the_policys_tokens(given: dict) -> None:
    played = random_groups(3, dense=True)
    algorithms = [config(**given, observation_coefficient=c) for c in (0.0, 0.5)]
    rng, credits = np.random.default_rng(0), []
    known: dict[int, float] = {}
    for algorithm in algorithms:
        data = build_training_data(played, algorithm)
        arrays = [
            np.array([known.setdefault(int(t), float(rng.normal())) for t in s.token_ids[s.scored_mask]])
            for s in data.samples
        ]
        credit = token_advantages(
            data,
            values=arrays if algorithm.needs_critic else None,
            penalties=arrays if algorithm.kl_in.kind == "reward" else None,
            config=algorithm,
        )
        by_token = {}
        for made, advantages in zip(data.samples, credit.advantages, strict=True):
            trained = made.loss_mask[made.scored_mask]
            assert (advantages[~trained] == 0).all()
            tokens = made.token_ids[made.loss_mask].tolist()
            by_token |= dict(zip(tokens, advantages[trained].tolist(), strict=True))
        assert any(s.observed.any() for s in data.samples) == (algorithm is algorithms[1])
        credits.append(by_token)
    assert credits[0] == pytest.approx(credits[1])


def test_a_prepended_demonstration_shifts_observations_with_their_tokens() -> None:
    made = episode_samples(branching(), np.ones(4), group_id="g", config=config())
    prefixed = with_demonstrations(made, {"e": np.array([7, 8, 9], np.int32)})
    for before, after in zip(made, prefixed, strict=True):
        assert after.token_ids[after.observed].tolist() == before.token_ids[before.observed].tolist()
        assert after.scored_mask.sum() == before.scored_mask.sum()


def test_masks_that_contradict_each_other_are_refused() -> None:
    made = sample([9, 1, 2, 3], [1, 3])
    with pytest.raises(ValueError, match="both an observation and sampled by the policy"):
        with_observations(made, [1])
    with pytest.raises(ValueError, match="not followed by a trained token"):
        with_observations(sample([9, 1, 2], [1]), [2])
    with pytest.raises(ValueError, match="first token cannot be trained"):
        with_observations(made, [0])
    with pytest.raises(ValueError, match="all arrays must have one length"):
        replace(made, observation_mask=np.zeros(3, bool))
    image = ImageInput(np.zeros((1, 4), np.float32), (1, 1, 1), 2, 1)
    with pytest.raises(ValueError, match="a token of an image cannot be predicted"):
        replace(with_observations(made, [2]), images=(image,))


def test_the_observation_coefficient_is_zero_by_default_and_must_not_be_negative() -> None:
    assert AlgorithmConfig().observation_coefficient == 0
    assert AlgorithmConfig.model_validate({"preset": "sft", "observation_coefficient": 0.1}).is_supervised
    with pytest.raises(ValidationError, match="observation_coefficient"):
        config(observation_coefficient=-1)
    assert build_training_data([group([branching()])], config()).report.sampled_tokens == 5
