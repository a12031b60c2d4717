"""Builds the data that the trainer is timed on: groups of recorded episodes with random tokens, and random
models.

The samples are built by `build_training_data`, as in the trainer, so samples, owners of shared tokens and
advantages are those of a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.core.completion import Completion, SamplingParams, as_logprobs, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode, Reward, Rollout, RolloutGroup, Task
from areal_agents.core.trajectory import Turn

Lengths = npt.NDArray[np.int64]

ALGORITHM = AlgorithmConfig.model_validate(
    {"preset": "dapo", "minibatches": 1, "length_penalty": "none", "refill_equal_groups": False}
)
FIRST_TOKEN = 4  # smaller ids are the tokenizer's special tokens


def save_model(folder: Path, shape: ModelShape, *, bfloat16: bool = False, device: str = "cpu") -> Path:
    """Write random weights of a dense Qwen3 of this shape, with tied embeddings, as a Hugging Face folder.

    Args:
        device: where the weights are made; a GPU takes a second for 1.7B parameters, a CPU half a minute.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    (model.bfloat16() if bfloat16 else model).save_pretrained(folder)
    return folder


class Recorder:
    """Samples random episodes over a vocabulary; equal seeds give equal episodes."""

    def __init__(self, vocab: int, *, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._vocab = vocab

    def log_normal(self, count: int, *, median: int, longest: int) -> Lengths:
        """Log-normal lengths in tokens with σ = 1, at most `longest`."""
        lengths = median * self.rng.lognormal(0.0, 1.0, count)
        return np.clip(lengths, 2, longest).astype(np.int64)

    def answers(self, group: int, *, prompt: int, lengths: Sequence[int] | Lengths) -> RolloutGroup:
        """Episodes of one turn each, with one prompt and answers of these lengths."""
        first = self._tokens(prompt)
        name = f"group-{group}"
        episodes = [
            self._episode(f"{name}-{index}", name, [self._turn(f"{index}", None, first, int(length))])
            for index, length in enumerate(lengths)
        ]
        return self._group(name, episodes)

    def branching(
        self, group: int, *, episodes: int, turns: int, system: int, added: int, sampled: int
    ) -> RolloutGroup:
        """Episodes whose turns form a tree: each turn continues the previous one or, with probability 1/4,
        any earlier one.

        Args:
            system: number of tokens of the first prompt, which all episodes share.
            added, sampled: number of tokens that each turn adds to the prompt, and that it samples.
        """
        first = self._tokens(system)
        name = f"group-{group}"
        out = []
        for index in range(episodes):
            record = [self._turn("0", None, first, sampled)]
            for place in range(1, turns):
                parent = place - 1 if self.rng.random() < 0.75 else int(self.rng.integers(place))
                record.append(self._turn(f"{place}", f"{parent}", self._tokens(added), sampled))
            out.append(self._episode(f"{name}-{index}", name, record))
        return self._group(name, out)

    def _tokens(self, count: int) -> npt.NDArray[np.int64]:
        return self.rng.integers(FIRST_TOKEN, self._vocab, count)

    def _turn(self, name: str, parent: str | None, prompt: npt.NDArray[np.int64], sampled: int) -> Turn:
        completion = Completion(
            token_ids=as_token_ids(self._tokens(sampled)),
            # the logprob of a uniform distribution
            logprobs=as_logprobs(np.full(sampled, -np.log(self._vocab))),
            versions=as_token_ids(np.zeros(sampled)),
            finish_reason="stop",
        )
        return Turn(
            id=name,
            parent=parent,
            new_messages=(Message("user", "question"),),
            new_prompt_ids=as_token_ids(prompt),
            completion=completion,
            reply=Message("assistant", "answer"),
            sampling=SamplingParams(max_new_tokens=sampled),
        )

    def _episode(self, name: str, task: str, turns: list[Turn]) -> RecordedEpisode:
        reward = Reward("episode", "", "return", float(self.rng.normal()))
        return RecordedEpisode(name, Task(task, {}), tuple(turns), "finished", (reward,))

    def _group(self, name: str, episodes: list[RecordedEpisode]) -> RolloutGroup:
        task = Task(name, {})
        return RolloutGroup(
            name, task, tuple(Rollout(task, index, e, None) for index, e in enumerate(episodes))
        )


def training_data(groups: Sequence[RolloutGroup]) -> TrainingData:
    """Samples and advantages of the groups, with the algorithm used in all measurements."""
    return build_training_data(groups, ALGORITHM)
