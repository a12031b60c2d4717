"""Warnings and refusals before a run or an evaluation starts anything."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from test_train import EXAMPLE

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.evaluation.policies import NamedPolicy
from areal_agents.launch.engines import plan_engines
from areal_agents.launch.evaluation import evaluate
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.train import train, without_trainer

ONE_GPU = """#!/bin/sh
echo '{"sglang": "0.5.21", "gpus": 1, "error": null}'
"""


@pytest.fixture
def sglang(tmp_path: Path) -> str:
    """A program that reports, like the Python of an SGLang, that it sees one GPU."""
    path = tmp_path / "python"
    path.write_text(ONE_GPU)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run folder that is in use, as is that of its evaluation, so that nothing starts there."""
    run = tmp_path / "run"
    with RunFolder(run).locked(), RunFolder(Path(f"{run}-eval")).locked():
        yield run


def config(run_dir: Path, *settings: str) -> Config:
    return load_config(EXAMPLE, ["engine.kind=sglang", f"run_dir={run_dir}", *settings])


def test_an_evaluation_reserves_no_gpu_for_a_trainer(sglang: str, run_dir: Path) -> None:
    given = config(run_dir, f"engine.python={sglang}")
    with pytest.raises(ConfigError, match="from GPU 1 on, need 2 GPUs, besides the trainer's 1"):
        train(given, console=Console(quiet=True))
    with pytest.raises(ConfigError, match="another process is using the run folder"):  # the plan was accepted
        evaluate(given, NamedPolicy(given.model, Path(given.model)), console=Console(quiet=True))


def test_an_evaluation_shares_no_memory_with_a_trainer(sglang: str, run_dir: Path) -> None:
    given = config(run_dir, f"engine.python={sglang}", "engine.colocate=split")
    assert (given.engine.static_memory, without_trainer(given).engine.static_memory) == (0.4, 0.0)
    chosen = config(run_dir, f"engine.python={sglang}", "engine.colocate=sleep", "engine.memory_fraction=0.5")
    assert without_trainer(chosen).engine.static_memory == 0.5


def test_settings_without_effect_on_running_servers_are_named_once(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = config(run_dir, "engine.urls=[http://gpu:1]", "engine.device=cuda")
    with pytest.raises(ConfigError, match="another process is using the run folder"):
        train(given, console=Console(quiet=True))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        "settings that have no effect on running servers, which keep their own settings: "
        "engine.slots, engine.device"
    ]  # the example sets engine.slots


def test_ranks_that_are_started_elsewhere_take_no_gpu_from_the_engines(sglang: str, run_dir: Path) -> None:
    given = config(run_dir, f"engine.python={sglang}", "trainer.ranks=16", "trainer.start=false")
    assert [placement.gpus for placement in plan_engines(given).placements] == [(0,)]
    beside = config(
        run_dir, f"engine.python={sglang}", "trainer.ranks=2", "trainer.start=false", "trainer.nodes=2"
    )
    with pytest.raises(ConfigError, match="from GPU 1 on, need 2 GPUs, besides the trainer's 1"):
        plan_engines(beside)
