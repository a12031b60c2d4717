"""The repair tasks can be solved, only a repair earns the reward, and demonstrations show real outputs."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import repairs
import reward
from demonstrator import CAREFUL, CARELESS, Habits, play
from dialogue import SUBMIT
from repairs import Repair, heldout_tasks, sample_repair, train_tasks
from reward import solved, solved_in_bubblewrap
from transfer import UNTRAINED, named, table

from areal_agents.evaluation.results import AttemptResult, Results, TaskResult
from areal_agents.rewards import FinishedEpisode


@pytest.fixture(autouse=True)
def tasks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the tasks of these tests to a temporary folder."""
    monkeypatch.setattr(repairs, "TASKS", tmp_path / "tasks")
    return tmp_path / "tasks"


def limit_programs(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the time limit of the programs that decide the reward."""
    monkeypatch.setattr(reward, "TIMEOUT_S", seconds)
    monkeypatch.setattr(reward._IN_BUBBLEWRAP, "_time_s", seconds)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program take long, because one that exceeds its limit earns nothing."""
    limit_programs(monkeypatch, 60.0)


def first_heldout_task() -> dict[str, Any]:
    """The first of `heldout_tasks()`; its folder alone is written."""
    (task,) = repairs._tasks("heldout", 0, count=1)
    return task


def outputs_of(commands: Sequence[str], folder: Path) -> list[str]:
    """Run commands as mini-swe-agent does: each in its own shell, with both output streams combined."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    return [
        subprocess.run(
            command, shell=True, cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60,
        ).stdout
        for command in commands
    ]  # fmt: skip


def left_in(folder: Path, task: dict[str, Any]) -> FinishedEpisode:
    return FinishedEpisode("e", task, (), "finished", {}, folder)


def copy_of(task: dict[str, Any], to: Path) -> Path:
    return Path(shutil.copytree(task["folder"], to))


def commands_of(repair: Repair) -> list[str]:
    """The commands of a repairer without mishaps, without the final submission."""
    commands, _, _ = play(repair, Habits(), random.Random(0))
    assert commands[-1] == SUBMIT
    return commands[:-1]


def test_no_function_of_training_is_held_out() -> None:
    train, heldout = train_tasks(), heldout_tasks()
    assert (len(train), len(heldout)) == (1000, 256)
    shown = [(Path(task["folder"]) / task["file"]).read_text() for task in (*train, *heldout)]
    docstrings = [text.split('"""')[1] for text in shown]
    assert not set(docstrings[:1000]) & set(docstrings[1000:])
    assert [task["id"] for task in train] != [task["id"] for task in train_tasks(seed=1)]
    assert heldout == heldout_tasks() and heldout[0] == first_heldout_task()


def in_bubblewrap(episode: FinishedEpisode) -> float:
    return asyncio.run(solved_in_bubblewrap(episode))


needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


@pytest.mark.parametrize("solved", [solved, pytest.param(in_bubblewrap, marks=needs_bubblewrap)])
def test_the_reward_is_earned_by_the_repair_and_by_nothing_else(
    solved: Callable[[FinishedEpisode], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = first_heldout_task()
    repair = sample_repair(random.Random("heldout/0"), held_out=True)  # the same task
    broken = copy_of(task, tmp_path / "broken")
    assert solved(left_in(broken, task)) == 0.0
    (broken / "test.py").write_text("print('ok')\n")
    assert solved(left_in(broken, task)) == 0.0

    repaired = copy_of(task, tmp_path / "repaired")
    assert outputs_of(commands_of(repair), repaired)[-1] == "ok\n"
    assert solved(left_in(repaired, task)) == 1.0
    file = repaired / task["file"]
    for text in (
        "def pick(*_):\n    return 0\n",
        "raise SystemExit(0)\n",
        "print([True] * 4)\nraise SystemExit(0)\n",
        "def pick(\n",
        "import sys\nsys.stdout = None\n",
        "import os\nos.write(1, b'[' + b'1' * 5000 + b']')\nos._exit(0)\n",
        "import os\nos.write(1, b'[' * 60_000)\nos._exit(0)\n",
    ):
        file.write_text(text)
        assert solved(left_in(repaired, task)) == 0.0, text
    with monkeypatch.context() as patch:
        limit_programs(patch, 1.0)
        file.write_text("while True:\n    print('x' * 10_000)\n")
        assert solved(left_in(repaired, task)) == 0.0
    file.write_bytes(b"\xff\xfe")
    assert solved(left_in(repaired, task)) == 0.0
    file.unlink()
    assert solved(left_in(repaired, task)) == 0.0
    os.mkfifo(file)  # reading it would never end
    assert solved(left_in(repaired, task)) == 0.0


@needs_bubblewrap
def test_in_bubblewrap_a_program_cannot_read_the_expected_results(tmp_path: Path) -> None:
    task = first_heldout_task()
    folder = copy_of(task, tmp_path / "left")
    results = tmp_path / "results.json"
    results.write_text(json.dumps({json.dumps(case[:2]): case[2] for case in task["cases"]}))
    (folder / task["file"]).write_text(
        f"import json\nfound = json.load(open({str(results)!r}))\n"
        "def pick(*arguments):\n    return found[json.dumps(list(arguments))]\n"
    )
    assert solved(left_in(folder, task)) == 1.0
    assert in_bubblewrap(left_in(folder, task)) == 0.0


@pytest.mark.parametrize("habits", [CAREFUL, CARELESS], ids=["careful", "careless"])
def test_demonstrations_show_what_the_commands_print(habits: Habits, tmp_path: Path) -> None:
    rng = random.Random(3)
    for number in range(6):
        repair = sample_repair(rng, held_out=False)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / repair.wanted.file).write_text(repair.source)
        (folder / "test.py").write_text(repair.test)
        commands, outputs, _ = play(repair, habits, rng)
        assert outputs_of(commands[:-1], folder) == outputs
        assert commands[-1] == SUBMIT


def test_every_task_starts_with_a_failing_test_and_ends_repaired(tmp_path: Path) -> None:
    rng = random.Random(5)
    for _ in range(200):
        repair = sample_repair(rng, held_out=False)
        assert not repair.passes(repair.broken) and repair.passes(repair.wanted)
        assert any(repair.broken(values, limit) != result for values, limit, result in repair.hidden)


def test_the_table_of_transfer_has_each_model_with_each_agent(tmp_path: Path) -> None:
    def evaluated(folder: Path, scores: Sequence[float], *, failed: int = 0) -> None:
        statuses = ["failed"] * failed + ["finished"] * (len(scores) - failed)
        attempts = [
            AttemptResult(f"e{n}", 0, status, score, {}, 1, 1, 1, 1.0)
            for n, (status, score) in enumerate(zip(statuses, scores, strict=True))
        ]
        tasks = tuple(TaskResult(attempt.episode, (attempt,)) for attempt in attempts)
        folder.mkdir(parents=True)
        Results("n", "m", 1, 0.0, 1.0, False, tasks).write(folder / "results.json")

    evaluated(tmp_path / UNTRAINED / "short", [0.0, 1.0] * 50)
    evaluated(tmp_path / "short" / "short", [1.0] * 100)
    assert table(tmp_path, [UNTRAINED, "short"], ["short"]) == [
        "| trained through | short |",
        "| --- | --- |",
        "| untrained | 0.500 [0.404, 0.596] |",
        "| short | 1.000 [0.963, 1.000] |",
    ]
    evaluated(tmp_path / "other" / "short", [0.0] * 100, failed=3)
    assert table(tmp_path, ["other"], ["short"])[-1] == "| other | 0.000 [0.000, 0.037], 3 failed |"
    with pytest.raises(argparse.ArgumentTypeError, match="must be NAME=VALUE"):
        named("a/b=config.yaml")
