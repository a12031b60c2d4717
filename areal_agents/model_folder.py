"""Reads the JSON files of a Hugging Face model folder that processes without transformers need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_agents.errors import ConfigError


def folder_fault(folder: str | Path) -> str:
    """Return why a folder is not that of a model, "" if it is one."""
    if (Path(folder) / "config.json").is_file():
        return ""
    return f"{folder} is not a Hugging Face model folder (no config.json in it)"


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no such file.

    Raises:
        ConfigError: the file holds anything else.
    """
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def text_config(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the language model in config.json; ConfigError if the file is damaged."""
    config = read_object(folder / "config.json")
    return config.get("text_config") or config
