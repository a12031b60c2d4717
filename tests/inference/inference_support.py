"""Tiny random models, transformers as the reference, and the servers under test and their clients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_vllm import VLLMUrl
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from areal_agents.core.completion import Completion, TokenIds, as_token_ids
from areal_agents.inference import SGLangEngine
from areal_agents.inference.engine import PromptScores
from areal_agents.inference.vllm.client import VLLMEngine

VOCAB = 256
EOS = 2
MAX_CONTEXT = 2048
EMBEDDED = ["numba", "torch"]  # the kernels of the embedded engine
OF_SGLANGS_PROTOCOL = [*EMBEDDED, pytest.param("sglang", marks=pytest.mark.sglang)]
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
EVERY_SERVER = [*OF_SGLANGS_PROTOCOL, VLLM]
PLAIN_SGLANG = pytest.param("sglang-plain", marks=pytest.mark.sglang)
MOST_TRIES = 10
TEST_NUMBERS = itertools.count()
PATIENCE_S = 240.0  # a limit for actions that take seconds on an idle machine
FREEZING = [*EMBEDDED, PLAIN_SGLANG]  # the servers that may be paused in place
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def build_model(
    folder: Path, kind: str = "qwen3", *, seed: int = 0, shard: str = "5GB", **overrides: Any
) -> Path:
    """Write a model with random parameters, also norms and biases, so that each one affects the logits."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        "bos_token_id": 1,
    }
    if kind == "qwen3":
        sizes["head_dim"] = 24
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**(sizes | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder, max_shard_size=shard)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"w\d+"), "isolated")
    tokenizer.decoder = decoders.ByteLevel()  # words are joined without spaces
    tokenizer.save(str(folder / "tokenizer.json"))
    # Without this file, a real server uses the tokenizer class of the model type, which ignores these rules.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def load_reference(folder: Path) -> PreTrainedModel:
    """Load a model folder with transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logprobs(
    model: PreTrainedModel, prompt: TokenIds, output: TokenIds, *, temperature: float = 1.0
) -> np.ndarray:
    """Return the logprobs [C] of `output` after `prompt`, from a plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))[None]
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    table = torch.log_softmax(logits / temperature, dim=-1)
    return table.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@torch.inference_mode()
def reference_greedy(model: PreTrainedModel, prompt: TokenIds, count: int) -> np.ndarray:
    """Return `count` tokens that transformers samples greedily, ignoring the end of sequence."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].numpy()


def prompt_of(length: int, seed: int = 0) -> TokenIds:
    """Return random token ids without special tokens."""
    return as_token_ids(np.random.default_rng(seed).integers(8, VOCAB, length))


@dataclass(frozen=True)
class Target:
    """A server under test and the model it serves."""

    url: str
    folder: Path
    reference: PreTrainedModel
    embedded: bool


class OwnIds:
    """A mixin for clients that makes request ids unique, although several tests use the same ids.

    Tests share a server, and SGLang may abort a request whose id was used shortly before.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.begin_test()

    def begin_test(self) -> None:
        """Give all further requests ids that no earlier request has had."""
        self._test = f"test{next(TEST_NUMBERS)}-"

    async def generate(self, rid: str, *args: Any, **options: Any) -> Completion:
        return await super().generate(self._test + rid, *args, **options)

    async def score(self, rid: str, *args: Any, **options: Any) -> PromptScores:
        return await super().score(self._test + rid, *args, **options)

    async def abort(self, rid: str) -> None:
        # the client aborts a cancelled call by the id that it sent
        await super().abort(rid if rid.startswith(self._test) else self._test + rid)


class FreshIds(OwnIds, SGLangEngine):
    """A client of SGLang's protocol with unique request ids."""


class FreshVLLMIds(OwnIds, VLLMEngine):
    """A client of vLLM's protocol with unique request ids."""


def fresh_ids(url: str, **options: Any) -> Any:
    """Return a client of the protocol that `url` speaks, with unique request ids."""
    return (FreshVLLMIds if isinstance(url, VLLMUrl) else FreshIds)(url, **options)


def client_of(url: str, **options: Any) -> Any:
    """Return a client of the protocol that `url` speaks."""
    return (VLLMEngine if isinstance(url, VLLMUrl) else SGLangEngine)(url, **options)


class Missed(Exception):
    """The generation had already ended, or had not yet begun, when the test acted on it.

    The models are small, so an engine can sample hundreds of tokens while the process of the test stalls.
    """


def again_if_missed(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Repeat a test that raises Missed; after MOST_TRIES attempts it fails.

    Before each repetition its `engine`, if it has one, is resumed, and serves version 0 again if the test
    also has the fixture `model_folder`.
    """

    @functools.wraps(test)
    async def repeated(**fixtures: Any) -> None:
        engine, folder = fixtures.get("engine"), fixtures.get("model_folder")
        for _ in range(MOST_TRIES - 1):
            with suppress(Missed):
                return await test(**fixtures)
            if engine is not None:
                engine.begin_test()
                await engine.resume()
                if folder is not None:
                    await engine.update_weights_from_disk(str(folder), 0)
        return await test(**fixtures)

    return repeated
