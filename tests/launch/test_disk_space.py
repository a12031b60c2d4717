"""Low disk space: how much space a run needs, and how a shortage is reported."""

from __future__ import annotations

import io
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from areal_agents.config import load_config
from areal_agents.launch.disk_space import DiskSpace, disk_space_of
from areal_agents.launch.report.changes import Changes
from areal_agents.launch.report.lines import LineReport
from areal_agents.launch.run_folder import RunFolder
from areal_agents.training.publish.config import versions_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent" / "config.yaml"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The free space of the disk in GB, which a test can change."""
    left = {"gb": 10.0}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, int(left["gb"] * 1e9)))
    return left


def folder_of(root: Path, name: str, size: int) -> None:
    (root / name).mkdir(parents=True)
    with open(root / name / "file", "wb") as file:
        file.truncate(size)


def test_space_is_required_for_the_next_checkpoint_and_weights_too(
    tmp_path: Path, free: dict[str, float]
) -> None:
    kept = [tmp_path / "checkpoints", tmp_path / "weights"]
    space = DiskSpace([tmp_path, tmp_path / "not" / "there"], kept=kept, min_free_gb=1.0)
    free["gb"] = 1.1
    assert space.shortage() is None
    folder_of(kept[0], "step-1", 300_000_000)
    folder_of(kept[0], ".step-2.tmp", 900_000_000)  # the trainer is still writing it
    said = space.shortage()
    assert said is not None and f"the disk of {tmp_path} has 1.1 GB free, and the run needs 1.3 GB" in said
    folder_of(kept[1], "v1", 200_000_000)
    free["gb"] = 1.4
    assert space.shortage() is not None
    free["gb"] = 1.6
    assert space.shortage() is None
    assert DiskSpace([tmp_path], kept=kept, min_free_gb=0).shortage() is None


def test_an_old_folder_that_is_being_removed_is_not_the_newest(
    tmp_path: Path, free: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "weights", "v2", 300_000_000)
    space = DiskSpace([tmp_path], kept=[tmp_path / "weights"], min_free_gb=1.0)
    free["gb"] = 1.1
    said = space.shortage()
    folder_of(tmp_path / "weights", "v1", 1)
    # The removal of its files changes the modification time of a folder.
    os.utime(tmp_path / "weights" / "v1", (2e9, 2e9))

    def gone(folder: Path, pattern: str) -> Iterator[Path]:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(Path, "rglob", gone)
    assert said is not None and space.shortage() == said


def test_a_shortage_is_reported_once_and_again_when_it_ends() -> None:
    out = io.StringIO()
    changes = Changes(steps=1, eval_episodes=0, trains_constrained=False)
    report = LineReport(Console(file=out, width=200), changes)
    for text in (None, "the disk is low", "the disk is lower", None, None):
        report.warn(text)
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines == ["warning: the disk is low", "the warning no longer applies; the run continues"]


def test_weights_of_other_runs_in_a_shared_folder_do_not_count(
    tmp_path: Path, free: dict[str, float]
) -> None:
    shared, run = tmp_path / "shm", tmp_path / "run"
    config = load_config(EXAMPLE, [f"run_dir={run}", f"trainer.publish.folder={shared}"])
    space = disk_space_of(config, RunFolder(run))
    folder_of(shared, "of-another-run", 5_000_000_000)
    free["gb"] = 1.5
    assert space.shortage() is None
    folder_of(versions_folder(str(shared), run), "v7", 1_000_000_000)
    assert "the run needs 2.0 GB" in str(space.shortage())
