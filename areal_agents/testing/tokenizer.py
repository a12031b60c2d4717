"""Reads the tokenizer of a model folder, and the token that ends its replies."""

from __future__ import annotations

from pathlib import Path

import orjson
from tokenizers import Tokenizer

from areal_agents.errors import ConfigError


def read_tokenizer(folder: str | Path) -> tuple[Tokenizer, int]:
    """Return the tokenizer of a model folder and its stop token. Raise ConfigError if one is missing."""
    file, settings = Path(folder) / "tokenizer.json", Path(folder) / "tokenizer_config.json"
    if not file.is_file() or not settings.is_file():
        raise ConfigError(
            f"{folder} is not a model folder: it must have tokenizer.json and tokenizer_config.json"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
        eos = orjson.loads(settings.read_bytes()).get("eos_token")
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"the tokenizer in {folder} cannot be read: {error}") from error
    text = eos.get("content") if isinstance(eos, dict) else eos
    stop_token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if stop_token_id is None:
        raise ConfigError(f"eos_token in {settings} must be a token of the tokenizer, got {eos!r}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, stop_token_id
