"""The critic: its first values are zero, it learns the values of states, and PPO improves with it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from presets_support import WHOLE, groups, largest_difference, preset, train_once
from training_support import VOCAB, build_model
from transformers import AutoModelForCausalLM

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.samples import build_training_data
from areal_agents.core.completion import Completion, SamplingParams, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode, Reward, Rollout, RolloutGroup, Task
from areal_agents.core.trajectory import Turn
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.critic import CriticState, load_critic
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.step.optimizer import make_optimizer
from areal_agents.training.step.results import explained_variance
from areal_agents.training.step.step import StepResult, train_batch


def played(
    name: str, prompt: np.ndarray, sampled: np.ndarray, logprobs: np.ndarray, reward: float
) -> RecordedEpisode:
    """Return an episode of one turn."""
    turn = Turn(
        id=f"{name}-0",
        parent=None,
        new_messages=(Message("user", name),),
        new_prompt_ids=as_token_ids(prompt),
        completion=Completion(
            as_token_ids(sampled), logprobs.astype(np.float32), np.zeros(len(sampled), np.int32), "stop"
        ),
        reply=Message("assistant", name),
        sampling=SamplingParams(max_new_tokens=len(sampled)),
    )
    return RecordedEpisode(
        name, Task("task", {}), (turn,), "finished", (Reward("episode", "", "return", reward),)
    )


def grouped(name: str, episodes: list[RecordedEpisode]) -> RolloutGroup:
    rollouts = tuple(Rollout(e.task, index, e, None) for index, e in enumerate(episodes))
    return RolloutGroup(name, episodes[0].task, rollouts)


def test_a_new_critic_returns_zero_and_trains_all_of_its_weights(model_folder: Path, group: Ranks) -> None:
    critic = load_critic(model_folder, group)
    samples = build_training_data(groups("a"), preset("ppo")).samples
    (batch,) = pack(samples, token_budget=4096)
    values = critic(batch)
    assert values.shape == (batch.scored_tokens,) and values.dtype == torch.float32
    assert (values == 0).all()
    (values - 1).square().sum().backward()
    assert [name for name, p in critic.named_parameters() if p.grad is None] == []
    assert not any("lm_head" in name for name, _ in critic.named_parameters())


def test_the_values_are_those_of_the_states_before_the_tokens(model_folder: Path, group: Ranks) -> None:
    """The oracle is transformers' hidden states, one sample at a time, under a head with known weights."""
    critic = load_critic(model_folder, group)
    torch.manual_seed(0)
    weight = torch.randn(1, 32)
    critic.head.weight.to_local().data.copy_(weight)  # one rank holds all of it
    critic.head.bias.to_local().data.fill_(1)
    samples = build_training_data(groups("ab"), preset("ppo")).samples
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        (batch,) = pack(samples, token_budget=4096)
        values = critic(batch)
        for index, sample in enumerate(samples):
            ids = torch.tensor(sample.token_ids[None].astype(np.int64))
            hidden = plain.model(ids).last_hidden_state[0]
            before = hidden[np.flatnonzero(sample.loss_mask) - 1]
            want = (before @ weight.T).squeeze(-1) + 1
            torch.testing.assert_close(values[batch.sample_index == index], want, atol=1e-4, rtol=1e-4)


def test_a_critic_with_adapters_is_refused(model_folder: Path, group: Ranks) -> None:
    with pytest.raises(ValueError, match="all of its weights"):
        load_critic(model_folder, group, options=ModelOptions(lora=LoraOptions()))


def test_explained_variance() -> None:
    targets = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(targets, targets) == 1
    assert explained_variance(torch.zeros(4), targets) == 0
    assert explained_variance(targets + 7, targets) == 1  # a constant is not variance
    assert explained_variance(-targets, targets) == pytest.approx(-3)
    assert math.isnan(explained_variance(targets, torch.ones(4)))


def test_the_critic_learns_a_known_value(model_folder: Path, group: Ranks) -> None:
    """The reward depends only on the prompt's first token, so it is the value of every state."""
    rng = np.random.default_rng(0)
    rewards = [0.0, 1.0, 3.0]
    made = []
    for index, reward in enumerate(rewards * 2):
        prompt = np.array([10 + index % 3, *rng.integers(20, VOCAB, 4)])
        episodes = [
            played(f"{index}-{e}", prompt, rng.integers(20, VOCAB, 3), rng.normal(-4.5, 0.3, 3), reward)
            for e in range(2)
        ]
        made.append(grouped(str(index), episodes))
    algorithm = preset("ppo", minibatches=1, value_clip=None)
    data = build_training_data(made, algorithm)
    policy, critic = load_policy(model_folder, group), load_critic(model_folder, group)
    state = CriticState(critic, make_optimizer(critic, TrainerConfig(), lr=5e-3))
    still = torch.optim.SGD(policy.parameters(), lr=0.0)
    results: list[StepResult] = []
    for step in range(60):
        results.append(
            train_batch(
                policy, still, data, algorithm, WHOLE, ranks=group, version=0, seed=step, critic=state
            )
        )
    first, last = results[0].critic, results[-1].critic
    assert first is not None and last is not None
    assert first.explained_variance == pytest.approx(0, abs=1e-6)
    # ½ mean (0 − R)² at values of zero
    assert first.loss == pytest.approx(np.mean(np.square(rewards)) / 2, rel=1e-5)
    assert last.explained_variance > 0.95 and last.loss < 0.1 * first.loss
    with torch.no_grad():
        (batch,) = pack(data.samples, token_budget=4096)
        values = critic(batch)
    for index, sample in enumerate(data.samples):
        reward = rewards[int(sample.token_ids[0]) - 10]
        assert float(values[batch.sample_index == index].mean()) == pytest.approx(reward, abs=0.3)


def test_ppo_with_a_critic_raises_the_reward(tmp_path: Path, group: Ranks) -> None:
    """The reward is the share of small token ids: the policy's probability of them must rise."""
    folder = build_model(tmp_path / "model", seed=3)
    policy, critic = load_policy(folder, group), load_critic(folder, group)
    optimizer = make_optimizer(policy, TrainerConfig(), lr=1e-2)
    state = CriticState(critic, make_optimizer(critic, TrainerConfig(), lr=3e-3))
    algorithm = preset("ppo", minibatches=2)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, VOCAB, (4, 6))
    torch.manual_seed(0)
    means = []
    for step in range(12):
        plain.load_state_dict(policy.full_state_dict(), strict=False)
        made = [sample_group(plain, prompt, f"{step}-{i}") for i, prompt in enumerate(prompts)]
        data = build_training_data(made, algorithm)
        means.append(float(np.mean(data.report.rewards)))
        result = train_batch(
            policy, optimizer, data, algorithm, WHOLE, ranks=group, version=0, seed=step, critic=state
        )
        assert result.statistics.as_dict()["abs_diff_max"] < 1e-4  # sampled with the same weights
    assert means[0] < 0.65 and np.mean(means[-3:]) > 0.8


def sample_group(model: torch.nn.Module, prompt: np.ndarray, name: str, *, size: int = 8) -> RolloutGroup:
    """Return a group of episodes in which the model samples four tokens after the prompt."""
    ids = torch.tensor(prompt).repeat(size, 1)
    logprobs = []
    with torch.no_grad():
        for _ in range(4):
            every = torch.log_softmax(model(ids).logits[:, -1], -1)
            drawn = torch.multinomial(every.exp(), 1)
            logprobs.append(every.gather(1, drawn))
            ids = torch.cat([ids, drawn], 1)
    sampled = ids[:, len(prompt) :].numpy()
    drawn_logprobs = torch.cat(logprobs, 1).numpy()
    return grouped(
        name,
        [
            played(
                f"{name}-{i}", prompt, sampled[i], drawn_logprobs[i], float((sampled[i] < VOCAB // 2).mean())
            )
            for i in range(size)
        ],
    )


@pytest.mark.parametrize(
    ("fields", "policy_skips", "critic_skips"),
    [({"value_coefficient": 1e39}, 0, 1), ({"entropy_coefficient": 1e39}, 1, 0)],
)
def test_a_gradient_that_is_not_finite_skips_only_its_own_step(
    fields: dict, policy_skips: int, critic_skips: int, model_folder: Path, group: Ranks
) -> None:
    algorithm = preset("ppo", minibatches=1, **fields)
    result, weights = train_once(algorithm, model_folder, model_folder, group)
    _, before = train_once(algorithm, model_folder, model_folder, group, lr=0.0)
    assert result.critic is not None
    assert (result.skipped_steps, result.critic.skipped_steps) == (policy_skips, critic_skips)
    for prefix, skipped in (("model", policy_skips), ("critic", critic_skips)):
        part = {n: w for n, w in weights.items() if n.startswith("critic") == (prefix == "critic")}
        moved = largest_difference(part, {name: before[name] for name in part})
        assert (moved == 0) == bool(skipped), prefix


@pytest.mark.parametrize(("algorithm", "what"), [("ppo", "critic"), ("dpo", "reference")])
def test_a_missing_model_is_an_error(algorithm: str, what: str, model_folder: Path, group: Ranks) -> None:
    policy = load_policy(model_folder, group)
    config = preset(algorithm)
    with pytest.raises(ValueError, match=f"needs a {what}, got none"):
        train_batch(
            policy, torch.optim.SGD(policy.parameters(), lr=0.0), build_training_data(groups("a"), config),
            config, WHOLE, ranks=group, version=0, seed=0,
        )  # fmt: skip


def test_a_critic_that_the_algorithm_does_not_use_is_an_error(model_folder: Path, group: Ranks) -> None:
    policy, critic = load_policy(model_folder, group), load_critic(model_folder, group)
    with pytest.raises(ValueError, match="has no critic, got one"):
        train_batch(
            policy, torch.optim.SGD(policy.parameters(), lr=0.0),
            build_training_data(groups("a"), AlgorithmConfig()), AlgorithmConfig(), WHOLE,
            ranks=group, version=0, seed=0,
            critic=CriticState(critic, torch.optim.SGD(critic.parameters(), lr=0.0)),
        )  # fmt: skip
