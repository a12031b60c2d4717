"""Writes a model folder without weights: one token per byte, and Qwen3's special tokens.

It can tokenise any string, so an agent can be examined without a model.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAME = "qwen3-without-weights"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def write_tiny_model(parent: Path) -> Path:
    """Write the folder into `parent`, and return its path."""
    folder = parent / NAME
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in _MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder
