"""The games run in the real packages, and demonstrations have exactly the tokens that are sent there."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from game_players import (
    CAREFUL,
    CARELESS,
    MOST_TRIES,
    Habits,
    countdown_reply,
    random_block,
    sum_reply,
    tries,
)
from game_tasks import Countdown, Sum
from run_logs import ends_of_logs

from areal_agents.launch.run_folder import RunFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "games"
SHOWN = Path(__file__).parent / "shown_games.py"


def test_every_equation_is_correct() -> None:
    rng = random.Random(0)
    blocks = [random_block(rng) for _ in range(200)]
    equations = [one for block in blocks for one in re.findall(r"(-?\d+[-+]\d+)=(-?\d+)", block.text)]
    assert len(equations) > 400
    assert all(eval(left) == int(right) for left, right in equations)
    compared = [one for block in blocks for one in re.findall(r"=(\d+)([<=>])(\d+)\n", block.text)]
    assert len(compared) > 200
    assert all(eval(f"{value}{'==' if sign == '=' else sign}{target}") for value, sign, target in compared)
    for block in blocks:
        numbers = re.findall(r"\d+", block.text)
        assert block.determined and max(block.determined) == len(numbers) - 1, "each ends with a result"
    for one in tries((19, 4, 12)):
        assert eval(one.expression) == one.value == int(one.steps.rsplit("=")[-1])
        assert sorted(map(int, re.findall(r"\d+", one.expression))) == [4, 12, 19]


@pytest.mark.parametrize(
    ("question", "numbers", "target"),
    [
        ("Using all the numbers 3, 14, 5, create an expression that equals 22.", (3, 14, 5), 22),
        ("Find a way to make 10 using all of these numbers: 5, 8, 7.", (5, 8, 7), 10),
        ("Calculate 19 using all of these numbers: 20, 1, 2.", (20, 1, 2), 19),
    ],
)
def test_a_careful_player_answers_correctly(question: str, numbers: tuple[int, ...], target: int) -> None:
    task = Countdown.read(question)
    assert (task.numbers, task.target) == (numbers, target)
    reply = countdown_reply(task, CAREFUL, random.Random(0))
    *found, answer = reply.splitlines()
    assert len(found) <= MOST_TRIES and found[-1].endswith(f"={target}")
    assert eval(answer.removeprefix("<answer>").removesuffix("</answer>")) == target
    gives_up = Habits(hasty=1.0, gives_up=1.0)
    replies = [countdown_reply(task, gives_up, random.Random(seed)).splitlines() for seed in range(20)]
    assert all(len(lines) == 2 for lines in replies), "one expression, and the answer"
    assert any(not lines[0].endswith(f"={target}") for lines in replies)


def test_sums_are_read_and_added() -> None:
    one = Sum.read("State the final answer to the following arithmetic problem: 4 - 1 - 7 =")
    assert one.terms == (4, -1, -7)
    assert sum_reply(one, CAREFUL, random.Random(0)) == "4-1=3 3-7=-4\n<answer>-4</answer>"
    assert sum_reply(one, Habits(leaves_out=1.0), random.Random(0)) == "4-1=3\n<answer>3</answer>"
    assert CARELESS.leaves_out > 0.5  # so the most likely reply is a bad one, too


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter that has reasoning-gym and textarena (`make environments`)."""
    return str(Path(request.config.getoption("--environments")).absolute())


@pytest.mark.environments
def test_demonstrations_have_the_tokens_that_the_environments_send(python: str, tmp_path: Path) -> None:
    found = _json(python, SHOWN, tmp_path)
    assert found["overlap"] == {"countdown": [], "chain_sum": []}
    for name in ("countdown", "chain_sum", "GuessTheNumber-v0-hardcore"):
        assert found["played"][name]["ids"] == found["demonstrated"][name], name
        assert found["played"][name]["reward"] == 1.0
        assert found["played"][name]["roots"] == 1  # the whole game is one trajectory
    assert found["held_out"] == {"countdown": 256, "chain_sum": 253, "GuessTheNumber-v0-hardcore": 256}


@pytest.mark.environments
def test_three_sources_train_two_steps_with_a_curriculum(python: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    small = (
        "trainer.steps=2", "trainer.warmup_steps=0", "rollout.groups=4", "rollout.group_size=4",
        "trial=false", "rollout.concurrency=8", "eval.episodes=4", "trainer.trackers=[]",
        f"run_dir={run_dir}",
    )  # fmt: skip
    done = subprocess.run(
        [python, "-m", "areal_agents.cli", "train", str(EXAMPLE / "config.yaml"), *small],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + ends_of_logs(run_dir)
    folder = RunFolder(run_dir)
    steps = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2]
    names = {name for row in steps for name in row["rewards_by_source"]}
    assert names == {"countdown", "GuessTheNumber-v0-hardcore", "chain_sum"}
    shown = subprocess.run(
        [sys.executable, "-m", "areal_agents.cli", "tasks", str(run_dir), "--json"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    tasks = json.loads(shown)
    assert len(tasks) >= 8 and {task["task"].partition("/")[0] for task in tasks} == names
    assert all(task["attempts"] == 4 for task in tasks if task["pool"] != "new")


def _json(python: str, script: Path, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [python, str(script), str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
