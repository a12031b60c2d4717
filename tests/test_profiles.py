"""Profiles: sets of ordinary keys that fit the named machines, and that all other settings override."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from areal_agents.config import load_config
from areal_agents.config.origins import annotated
from areal_agents.config.profiles import PROFILES
from areal_agents.errors import ConfigError

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from memory_table import model_config  # noqa: E402


def config_file(folder: Path, profile: str, model: str = "0.6B", **settings: object) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(model_config(model)))
    (folder / "tasks.jsonl").write_text('{"question": "?"}\n')
    tree = {
        "model": "model", "agent": "agent.py:agent", "data": {"path": "tasks.jsonl"}, "profile": profile,
        **settings,
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


PYTHON = "engine.python=/nowhere/bin/python"


def test_given_settings_override_a_profile_key_by_key(tmp_path: Path) -> None:
    path = config_file(tmp_path, "24gb", trainer={"lora": {"alpha": 8.0}, "steps": 7})
    config = load_config(path, [PYTHON, "engine.memory_fraction=0.5"])
    assert (config.engine.colocate, config.engine.memory_fraction, config.engine.max_context) == (
        "sleep",
        0.5,
        8192,
    )
    assert config.trainer.lora is not None
    assert (config.trainer.lora.rank, config.trainer.lora.alpha) == (32, 8.0)
    assert (config.trainer.lr, config.trainer.steps, config.trainer.publish.transport) == (2e-5, 7, "lora")
    whole = load_config(path, [PYTHON, "trainer.lora=null"])
    assert whole.trainer.lora is None and whole.trainer.publish.transport == "disk"
    plain = load_config(path, ["profile=''"])
    assert (plain.engine.kind, plain.trainer.device) == ("embedded", "auto")


def test_a_dry_run_names_the_profile_as_origin(tmp_path: Path) -> None:
    text = annotated(config_file(tmp_path, "node", engine={"replicas": 3}), [PYTHON])
    origins = {line.split(":")[0].strip(): line.rpartition("# ")[2] for line in text.splitlines()}
    assert origins["ranks"] == origins["transport"] == "profile node"
    assert (origins["replicas"], origins["python"], origins["profile"]) == ("file", "argument", "file")
    assert origins["tensor_parallel"] == "default"


def test_a_profile_needs_sglang_and_has_a_known_name(tmp_path: Path) -> None:
    path = config_file(tmp_path, "80gb")
    with pytest.raises(ConfigError, match="kind: sglang needs python"):
        load_config(path)
    with pytest.raises(ConfigError, match="profile: Input should be '', '24gb', '80gb' or 'node'"):
        load_config(path, ["profile=48gb"])
    assert set(PROFILES) == {"24gb", "80gb", "node"}


@pytest.mark.parametrize(
    ("profile", "model", "gpus", "gib", "settings"),
    [
        ("24gb", "1.7B", 1, 24, ()),
        pytest.param("80gb", "1.7B", 1, 80, (), marks=pytest.mark.slow),
        pytest.param("80gb", "14B", 1, 80, ("trainer.lora={rank: 32}",), marks=pytest.mark.slow),
        pytest.param("node", "8B", 8, 80, (), marks=pytest.mark.slow),
    ],
)
def test_the_models_that_a_profile_names_fit(
    profile: str, model: str, gpus: int, gib: int, settings: tuple[str, ...], tmp_path: Path
) -> None:
    path = config_file(tmp_path, profile, model)
    command = [sys.executable, "-m", "areal_agents", "plan", str(path), PYTHON, *settings]
    command += ["--gpus", str(gpus), "--gpu-memory", str(gib)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "COLUMNS": "160"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "microbatch_tokens: 32768" in done.stdout
