"""What a run derives from its engines: the numbers of proxy workers, concurrent calls and episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_agents.config import load_config, save_config
from areal_agents.config.files import read_file
from areal_agents.errors import ConfigError
from areal_agents.inference.config import EngineConfig
from areal_agents.proxy import config as proxy_config
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rollout.config import RolloutConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent" / "config.yaml"
SGLANG = {"kind": "sglang", "python": "p"}
URLS = tuple(f"http://gpu{index}:30000" for index in range(8))


@pytest.mark.parametrize(
    ("engine", "sequences"),
    [
        ({}, 64),
        ({"slots": 16, "replicas": 3}, 48),
        (SGLANG | {"replicas": 8}, 2048),
        ({"kind": "sglang", "urls": URLS[:2]}, 512),
        (SGLANG | {"replicas": 2, "arguments": ("--max-running-requests", "96")}, 192),
        (SGLANG | {"arguments": ("--max-running-requests=96", "--max-running-requests=48")}, 48),
    ],
)
def test_sequences_counts_the_concurrent_sequences_of_all_engines(
    engine: dict[str, Any], sequences: int
) -> None:
    assert EngineConfig(**engine).sequences == sequences


@pytest.mark.parametrize(
    ("sequences", "cores", "workers", "calls"),
    [
        (64, 2, 1, 256),  # the quick start on a laptop: one process
        (64, 128, 1, 256),
        (2048, 2, 1, 4096),
        (2048, 8, 2, 4096),
        (2048, 192, 4, 4096),
    ],
)
def test_workers_and_calls_follow_from_the_engines_and_the_cores(
    sequences: int, cores: int, workers: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_config, "available_cores", lambda: cores)
    chosen = ProxyConfig().for_engines(sequences)
    assert (chosen.workers, chosen.max_concurrent) == (workers, calls)
    given = ProxyConfig(workers=3, max_concurrent=7)
    assert given.for_engines(sequences) == given


def test_the_concurrency_of_episodes_follows_from_the_engines() -> None:
    assert RolloutConfig().for_engines(64).concurrency == 64
    assert RolloutConfig(concurrency=5).for_engines(64).concurrency == 5


def test_auto_is_saved_as_0(tmp_path: Path) -> None:
    names = ["proxy.workers=auto", "proxy.max_concurrent=auto", "rollout.concurrency=auto"]
    config = load_config(EXAMPLE, names)
    assert (config.proxy.workers, config.proxy.max_concurrent, config.rollout.concurrency) == (0, 0, 0)
    save_config(config, tmp_path / "config.yaml")
    assert read_file(tmp_path / "config.yaml")["proxy"]["workers"] == 0
    with pytest.raises(ConfigError, match="workers"):
        load_config(EXAMPLE, ["proxy.workers=many"])
