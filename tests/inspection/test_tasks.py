"""The command that shows the attempts at each task in training, and their rewards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from store_support import complete_group, open_episode, reward  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two sources. In the second one, a score of 0.5 solves a task."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    sources = [{"name": "sums"}, {"name": "games", "difficulty": {"solved_score": 0.5}}]
    folder.config.write_text(yaml.safe_dump({"trainer": {"steps": 1}, "data": {"sources": sources}}))
    with Store.open(folder.store) as store:
        complete_group(store, "sums/a@0", [0.0, 0.0])
        complete_group(store, "sums/b@0", [1.0, 0.0])
        complete_group(store, "games/c@0", [0.5, 0.75])
        complete_group(store, "sums/a@1", [1.0, 0.5])
        open_episode(store, "e", "sums/d@0")
        store.set_rewards("e", reward(1.0)).result()
        open_episode(store, "f", "games/c@1")
        complete_group(store, "sums/held-out@0", [1.0], split="eval")
    return folder.root


def rows(run: Path, *arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["tasks", str(run), "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.output)
    return found


def test_each_task_has_its_attempts_rewards_and_pool(run: Path) -> None:
    assert rows(run) == [
        {
            "task": "sums/b", "groups": 1, "attempts": 2, "reward": 0.5, "last_reward": 0.5, "solved": 0.5,
            "pool": "learnable", "version": 4,
        },
        {
            "task": "sums/a", "groups": 2, "attempts": 4, "reward": 0.375, "last_reward": 0.75,
            "solved": 0.25, "pool": "learnable", "version": 4,
        },
        {
            "task": "sums/d", "groups": 1, "attempts": 0, "reward": None, "last_reward": None,
            "solved": None, "pool": "new", "version": None,
        },
        {
            "task": "games/c", "groups": 2, "attempts": 2, "reward": 0.625, "last_reward": 0.625,
            "solved": 1.0, "pool": "solved", "version": None,
        },
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--pool", "learnable"], ["sums/b", "sums/a"]),
        (["--source", "games"], ["games/c"]),
        (["--sort", "reward"], ["games/c", "sums/b", "sums/a", "sums/d"]),
        (["--sort", "last", "--limit", "1"], ["sums/a"]),
        (["--sort", "pool"], ["sums/d", "sums/a", "sums/b", "games/c"]),
        (["--sort", "task", "--source", "sums"], ["sums/a", "sums/b", "sums/d"]),
        (["--limit", "1"], ["games/c"]),
    ],
)
def test_tasks_are_sorted_and_filtered(run: Path, arguments: list[str], names: list[str]) -> None:
    assert [row["task"] for row in rows(run, *arguments)] == names


def test_the_table_ends_with_the_sizes_of_the_pools(run: Path) -> None:
    shown = CliRunner().invoke(app, ["tasks", str(run), "--pool", "solved"], catch_exceptions=False).output
    assert "games/c" in shown and "100%" in shown and "sums/a" not in shown
    assert "4 tasks were begun: 1 new, 2 learnable, 0 unsolved, 1 solved" in shown
