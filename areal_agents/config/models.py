"""Finds the folder of a model that a configuration names: a folder, `quickstart`, or a model of the Hub.

A model of the Hugging Face Hub is downloaded once, into the cache of huggingface_hub, which shows the
progress and reads the token from HF_TOKEN or `hf auth login`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from areal_agents.errors import ConfigError
from areal_agents.quickstart import NAME, quickstart_model

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights in other formats are not downloaded.
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_WITHOUT_WEIGHTS = ("config.json", "tokenizer.json")


def is_model_name(value: str, base: Path) -> bool:
    """Whether a string is `quickstart` or the id of a model of the Hub, and not a path that exists."""
    return not (base / value).exists() and (value == NAME or _HUB_ID.fullmatch(value) is not None)


def model_folder(value: str, base: Path, *, weights: bool = True) -> str:
    """Return the absolute folder of a model; one of the Hub is downloaded if it is not in the cache.

    Args:
        value: a path, absolute or relative to `base`; `quickstart`; or an id such as Qwen/Qwen3-0.6B.
        weights: whether the weights are needed, or only the configuration.

    Raises:
        ConfigError: the model cannot be downloaded, or this installation has no quick-start model.
    """
    if not is_model_name(value, base):
        return os.path.normpath(base / value)
    if value != NAME:
        return _downloaded(value, _FILES if weights else _WITHOUT_WEIGHTS)
    folder = quickstart_model()
    if folder is None:
        raise ConfigError(
            "model: this installation of areal-agents has no quick-start model; install a wheel"
        )
    return str(folder)


def _downloaded(name: str, files: Sequence[str]) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    instead = f"hf download {name} --local-dir FOLDER"
    try:
        return snapshot_download(name, allow_patterns=[*files])
    except GatedRepoError:
        raise ConfigError(
            f"model: {name} needs permission: accept its conditions on https://huggingface.co/{name}, and "
            "set HF_TOKEN, or log in with hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"model: there is no folder {name}, and no model of this name on the Hugging Face Hub; if it is "
            "private, set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model: {name} is no folder, is not in the cache, and cannot be downloaded from the Hugging "
            f"Face Hub ({_first_line(error)}); on a machine with a network, call {instead}, and give that "
            "folder as the model"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
