"""Every configuration for GPUs in examples/ is valid, and names functions that exist.

`areal-agents plan` estimates whether they fit; their READMEs have the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.store import Store
from areal_agents.user_functions import load_function

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from memory_table import model_config  # noqa: E402

MODELS = ("model", "critic_model", "reference_model", "teacher_model")
CONFIGS = [path for path in sorted((ROOT / "examples").glob("*/*.yaml")) if "profile:" in path.read_text()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, for configurations that train on recorded episodes."""
    path = tmp_path_factory.mktemp("store") / "store.db"
    Store.open(path).close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder like that of a model from the Hub, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(model_config("1.7B")))
    return tmp_path


def settings(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a configuration, each with its path of keys."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from settings(value, (*path, key))
    elif isinstance(tree, list):
        for value in tree:
            yield from settings(value, path)
    else:
        yield path, tree


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_configuration_for_gpus_is_valid(path: Path, model: Path, store: Path) -> None:
    leaves = list(settings(yaml.safe_load(path.read_text())))
    named = [".".join(keys) for keys, _ in leaves if keys[-1] in MODELS]
    arguments = [f"{name}={model}" for name in named]
    if any(keys == ("data", "episodes") for keys, _ in leaves):
        arguments.append(f"data.episodes={store}")
    config = load_config(path, arguments)
    assert config.profile and config.engine.kind == "sglang"
    for keys, value in leaves:
        if keys[-1] in ("agent", "path", "reward", "answer") and ".py:" in str(value):
            load_function(str(path.parent / value), ConfigError)
