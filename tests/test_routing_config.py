"""`engine.routed_experts` is refused, before anything starts, if it is not available."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError

EXAMPLE = Path(__file__).parent.parent / "examples" / "search_agent" / "config.yaml"
SERVED = ["engine.kind=sglang", "engine.urls=[http://127.0.0.1:1]", "engine.routed_experts=true"]


def load(model: Path, *settings: str) -> Config:
    return load_config(EXAMPLE, [f"model={model}", *settings])


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_experts_per_tok": 2}))
    return tmp_path


def test_routed_experts_are_off_unless_requested(moe: Path) -> None:
    assert not load(moe).engine.routed_experts
    assert load(moe, *SERVED).engine.routed_experts


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"engine.routed_experts: .* has no experts"):
        load(tmp_path, *SERVED)


def test_context_parallelism_is_refused(moe: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.routed_experts: trainer.context_parallel: 2"):
        load(moe, *SERVED, "trainer.ranks=2", "trainer.context_parallel=2")


def test_the_embedded_engine_is_refused(moe: Path) -> None:
    with pytest.raises(ConfigError, match="routed_experts is for kind: sglang"):
        load(moe, "engine.routed_experts=true")
