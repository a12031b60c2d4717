"""Tiny models, samples, and rollouts recorded from a real engine into a real store."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.core.completion import Completion, SamplingParams, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode, Reward, Rollout, RolloutGroup, Task
from areal_agents.core.sample import TrainingSample
from areal_agents.core.trajectory import Turn
from areal_agents.inference import SGLangEngine
from areal_agents.store import NewEpisode, Store

VOCAB = 96
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
}


def build_model(folder: Path, kind: str = "qwen3", *, seed: int = 0, tied: bool = True) -> Path:
    """A random model of two layers in a Hugging Face folder."""
    torch.manual_seed(seed)
    options = {"head_dim": 16} if kind == "qwen3" else {}
    config = CONFIGS[kind](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,  # a real server on a CPU would pad it to a multiple of 32
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases at their initial values would hide mistakes
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """Add a tokenizer with a word per token, for a server that does not start without one."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"w\d+"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


async def put_back(url: str, folder: Path) -> None:
    """Serve the initial weights as version 0."""
    async with SGLangEngine(url) as engine:
        await engine.resume()
        await engine.update_weights_from_disk(str(folder), 0)


def make_sample(
    token_ids: Sequence[int],
    trained: Sequence[int],
    *,
    rng: np.random.Generator,
    group_id: str = "g",
    episode_id: str = "e",
    version: int = 0,
    temperature: float = 1.0,
) -> TrainingSample:
    """A sample whose tokens at the positions `trained` have random advantages and behavior logprobs."""
    length = len(token_ids)
    mask = np.zeros(length, bool)
    mask[list(trained)] = True
    return TrainingSample(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, rng.normal(-4.5, 0.3, length), 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        temperatures=np.where(mask, temperature, 1).astype(np.float32),
        advantages=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
        turn_index=np.where(mask, 0, -1).astype(np.int32),
        episode_id=episode_id,
        group_id=group_id,
    )


def random_group(
    rng: np.random.Generator, *, group_id: str, size: int = 4, prefix: int = 70, temperature: float = 1.0
) -> list[TrainingSample]:
    """Samples with a common prompt, each of two sampled turns with a tool's result between them. Half of them
    also have the same first turn, so that more than the prompt is shared."""
    prompt = rng.integers(2, VOCAB, prefix).tolist()
    opening = rng.integers(2, VOCAB, 5).tolist()
    samples = []
    for index in range(size):
        first = opening if index % 2 else rng.integers(2, VOCAB, rng.integers(1, 9)).tolist()
        answer = rng.integers(2, VOCAB, rng.integers(1, 12)).tolist()
        second = rng.integers(2, VOCAB, rng.integers(1, 9)).tolist()
        tokens = [*prompt, *first, *answer, *second]
        start = len(prompt) + len(first) + len(answer)
        trained = [*range(len(prompt), len(prompt) + len(first)), *range(start, len(tokens))]
        samples.append(
            make_sample(
                tokens,
                trained,
                rng=rng,
                group_id=group_id,
                episode_id=f"{group_id}-{index}",
                temperature=temperature,
            )
        )
    return samples


def training_data(samples: Sequence[TrainingSample]) -> TrainingData:
    """A batch of the given samples. Its episodes are unrelated; only token credit and DPO would use them."""
    other = build_training_data(episode_groups(np.random.default_rng(0), "o"), AlgorithmConfig())
    return replace(other, samples=tuple(samples))


def episode_groups(
    rng: np.random.Generator, names: Sequence[str], *, size: int = 4, prompt: int = 40
) -> list[RolloutGroup]:
    """Groups of episodes over one prompt each. Two turns continue the first turn of an episode, and every
    other episode has a second root with another prompt; temperatures and behavior logprobs vary."""
    groups = []
    for name in names:
        start = rng.integers(2, VOCAB, prompt)
        rollouts = []
        for index in range(size):
            episode = _random_episode(rng, f"{name}-{index}", start, second_root=index % 2 == 1)
            rollouts.append(Rollout(episode.task, index, episode, None))
        groups.append(RolloutGroup(name, rollouts[0].task, tuple(rollouts)))
    return groups


def _random_episode(
    rng: np.random.Generator, name: str, prompt: np.ndarray, *, second_root: bool
) -> RecordedEpisode:
    def turn(index: int, parent: int | None, new_prompt: np.ndarray) -> Turn:
        count = int(rng.integers(2, 9))
        return Turn(
            id=f"{name}-{index}",
            parent=None if parent is None else f"{name}-{parent}",
            new_messages=(Message("user", str(index)),),
            new_prompt_ids=as_token_ids(new_prompt),
            completion=Completion(
                as_token_ids(rng.integers(2, VOCAB, count)),
                rng.normal(-4.5, 0.3, count).astype(np.float32),
                np.zeros(count, np.int32),
                "stop",
            ),
            reply=Message("assistant", str(index)),
            sampling=SamplingParams(max_new_tokens=16, temperature=float(rng.choice([0.7, 1.0]))),
        )

    turns = [turn(0, None, prompt), *(turn(i, 0, rng.integers(2, VOCAB, 3)) for i in (1, 2))]
    if second_root:
        turns.append(turn(3, None, rng.integers(2, VOCAB, 9)))
    rewards = (Reward("episode", "", "return", float(rng.normal())), Reward("turn", turns[1].id, "step", 0.3))
    return RecordedEpisode(name, Task("task", {}), tuple(turns), "finished", rewards)


def reward_of(token_ids: np.ndarray) -> float:
    """The share of small token ids: a reward that a policy can learn."""
    return float(np.mean(np.asarray(token_ids) < VOCAB // 2))


def record_groups(
    store: Store,
    engine_url: str,
    names: Sequence[str],
    *,
    size: int = 4,
    tokens: int = 8,
    temperature: float = 1.0,
    adapters: bool = False,
) -> None:
    """Sample complete groups of two-turn episodes from a running engine, and store them as the proxy does.

    With `adapters` they are sampled with the adapter of the version that the engine serves."""
    asyncio.run(_record(store, engine_url, names, size, tokens, temperature, adapters))


async def _record(
    store: Store,
    engine_url: str,
    names: Sequence[str],
    size: int,
    tokens: int,
    temperature: float,
    adapters: bool,
) -> None:
    async with SGLangEngine(engine_url, adapters=adapters) as engine:
        plays = [
            _play(store, engine, name, index, size, tokens, temperature)
            for name in names
            for index in range(size)
        ]
        await asyncio.gather(*plays)


async def _play(
    store: Store, engine: SGLangEngine, name: str, index: int, size: int, tokens: int, temperature: float
) -> None:
    episode = f"{name}-{index}"
    prompt = np.random.default_rng(len(name) + sum(map(ord, name))).integers(2, VOCAB, 12)
    new = NewEpisode(
        id=episode,
        key_hash=hashlib.sha256(episode.encode()).hexdigest(),
        task=Task(name, {"q": name}),
        group_id=name,
        group_size=size,
        index=index,
    )
    await asyncio.wrap_future(store.open_episode(new))
    sampling = SamplingParams(max_new_tokens=tokens, temperature=temperature, ignore_eos=True)
    seen, parent, sampled = as_token_ids([]), None, []
    for turn, added in enumerate((prompt, np.array([2, 3, 4]))):
        seen = as_token_ids([*seen, *added])
        completion: Completion = await engine.generate(f"{episode}-{turn}", seen, sampling)
        record = Turn(
            id=f"{episode}-{turn}",
            parent=parent,
            new_messages=(Message("user", f"{name} {turn}"),),
            new_prompt_ids=as_token_ids(added),
            completion=completion,
            reply=Message("assistant", f"reply {episode} {turn}"),
            sampling=sampling,
        )
        await asyncio.wrap_future(store.add_turn(episode, record))
        seen, parent = as_token_ids([*seen, *completion.token_ids]), record.id
        sampled.extend(completion.token_ids.tolist())
    await asyncio.wrap_future(
        store.set_rewards(episode, [Reward("episode", "", "return", reward_of(np.array(sampled)))])
    )
    await asyncio.wrap_future(store.seal(episode, "finished"))
