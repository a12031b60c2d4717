"""A model folder in the Qwen3 chat format with a small tokenizer trained here: no download, no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from real_tokenizers import qwen_folder
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from areal_agents.rendering import ChatRenderer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CORPUS = [
    "system user assistant tool search for the capital of the country where Lyon is",
    '{"name": "search", "arguments": {"query": "capital of France", "limit": 3}}',
    "You may call one or more functions to assist with the user query.\n\n# Tools",
]


def write_model_folder(folder: Path, *, model_type: str = "qwen3") -> Path:
    """Write config.json, tokenizer.json and tokenizer_config.json of a tiny model in the Qwen3 format."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}})
    )
    return folder


@pytest.fixture(scope="session")
def model_writer() -> Callable[..., Path]:
    return write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> ChatRenderer:
    return ChatRenderer.from_folder(model_folder)


@pytest.fixture(scope="session")
def qwen25() -> ChatRenderer:
    """A renderer with the real vocabulary, which is read once because that takes seconds."""
    return ChatRenderer.from_folder(qwen_folder("qwen2"))


@pytest.fixture(scope="session")
def qwen3() -> ChatRenderer:
    """A renderer with the real vocabulary and the format of the family qwen3."""
    return ChatRenderer.from_folder(qwen_folder("qwen3"))
