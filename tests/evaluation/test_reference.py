"""Comparison of a run with reference curves: from the folders of runs, through a file, to a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.core.rollout import EpisodeStatus, Reward, Task
from areal_agents.errors import ConfigError
from areal_agents.evaluation import reference
from areal_agents.evaluation.reference import (
    HELD_OUT,
    OF_USERS,
    Curve,
    Evaluated,
    compare,
    curve_of,
    curves_in,
    rewards_at,
)
from areal_agents.store import NewEpisode, Store


def curve(*held_out: float, episodes: int = 100, rewards: tuple[float, ...] = ()) -> Curve:
    points = tuple(Evaluated(20 * n, reward, episodes) for n, reward in enumerate(held_out))
    return Curve("c", 0, rewards, HELD_OUT, points, 10.0)


def run_folder(root: Path, *, before: float, after: float, tasks: int = 20) -> Path:
    """Write a run of two steps whose evaluations solve these shares of the tasks."""
    root.mkdir()
    tree = {"seed": 3, "trainer": {"steps": 2}, "store": {"url": None}}
    (root / "config.yaml").write_text(yaml.safe_dump(tree))
    rows = [{"step": step, "time": 9.0, "reward_mean": 0.25 * step, "step_s": 2.0} for step in (1, 2)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Store.open(root / "store.db") as store:
        for label, share in (("before", before), ("after", after)):
            for index in range(tasks):
                metadata = {"source": "rollout", "eval": label, "step": 0 if label == "before" else 2}
                name = f"{label}-{index}"
                task = Task(str(index), {})
                new = NewEpisode(name, f"hash of {name}", task=task, split="eval", metadata=metadata)
                store.open_episode(new).result()
                score = float(index < round(share * tasks))
                store.set_rewards(name, [Reward("episode", "", "return", score)]).result()
                store.seal(name, "finished").result()
    return root


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "docs" / "reference").iterdir()), ids=str
)
def test_the_references_of_the_documentation_are_read(file: Path) -> None:
    curves = curves_in(file)
    assert len({curve.seed for curve in curves}) >= 3
    for number, curve in enumerate(curves):
        others = [other for other in curves if other is not curve]
        points = compare(curve, others)
        assert points[-1].reward - points[0].reward > 0.1, number
        assert points[-1].verdict != "below"


def test_the_interval_is_the_prediction_of_one_further_run() -> None:
    (_, last) = compare(curve(0.5, 0.7), [curve(0.5, reward) for reward in (0.88, 0.90, 0.92)])
    spread = max(0.02, math.sqrt(0.9 * 0.1 / 100))  # that of the seeds, but at least that of 100 tasks
    half = 4.302653 * spread * math.sqrt(1 + 1 / 3)
    assert (last.step, last.reward, last.reference) == (20, 0.7, pytest.approx(0.9))
    assert (last.low, last.high) == (pytest.approx(0.9 - half), pytest.approx(0.9 + half))
    assert last.verdict == "below"


def test_with_one_reference_the_spread_is_that_of_its_tasks_alone() -> None:
    within, below = (compare(curve(reward), [curve(0.9)])[0] for reward in (0.83, 0.80))
    assert within.high - within.low == pytest.approx(2 * 1.96 * 0.03 * math.sqrt(2))
    assert (within.verdict, below.verdict) == ("within", "below")
    assert compare(curve(1.0), [curve(0.9)])[0].verdict == "above"


def test_references_without_a_failure_leave_room_for_one() -> None:
    all_solved = [curve(0.5, 1.0, episodes=256) for _ in range(3)]
    one_failed, many_failed = (compare(curve(0.5, after), all_solved)[-1] for after in (255 / 256, 0.95))
    assert (one_failed.verdict, many_failed.verdict) == ("within", "below")


def test_only_steps_that_both_have_are_compared() -> None:
    shifted = Curve("c", 0, (), HELD_OUT, (Evaluated(7, 0.5, 10),), 1.0)
    assert compare(curve(0.5, 0.6), [shifted]) == []


@pytest.mark.parametrize(
    ("after", "said"),
    [(15, "at the steps 0, 2, and the reference at 15 .step 0 is before"), (None, "has no evaluation after")],
)
def test_a_comparison_without_a_common_step_after_training_began_is_an_error(
    tmp_path: Path, after: int | None, said: str
) -> None:
    run = run_folder(tmp_path / "run", before=0.3, after=0.3)
    steps = (0,) if after is None else (0, after)
    points = [{"step": step, "reward": 0.3, "episodes": 20} for step in steps]
    reference = {
        "name": "r", "seed": 0, "rewards": [], "measured": HELD_OUT, "points": points, "wall_s": 1.0
    }  # fmt: skip
    file = tmp_path / "reference.json"
    file.write_text(json.dumps({"format": 2, "runs": [reference]}))
    compared = CliRunner().invoke(app, ["compare", str(run), str(file)])
    assert isinstance(compared.exception, ConfigError) and compared.exit_code == 1
    assert compared.output == ""
    with pytest.raises(ConfigError, match=f"nothing was compared: .*{said}"):
        raise compared.exception


def test_the_training_reward_is_smoothed() -> None:
    assert rewards_at(curve(rewards=tuple(range(10))), (0.1, 0.5, 1.0)) == [0.0, 2.0, 7.0]
    assert rewards_at(curve(), (1.0,)) == [None]


def test_runs_are_written_and_read_and_compared_with_each_other(tmp_path: Path) -> None:
    good = [run_folder(tmp_path / f"good{n}", before=0.3, after=0.9) for n in range(2)]
    bad = run_folder(tmp_path / "bad", before=0.3, after=0.35)
    file = tmp_path / "reference.json"
    invoke = CliRunner().invoke
    written = invoke(app, ["reference", str(file), *map(str, good), "--note", "two cores"])
    assert written.exit_code == 0 and "0.900, 0.900" in written.output
    assert json.loads(file.read_text())["note"] == "two cores"
    assert curves_in(file) == [curve_of(run) for run in good]
    assert curve_of(bad).points == (Evaluated(0, 0.3, 20), Evaluated(2, 0.35, 20))
    assert (curve_of(bad).seed, curve_of(bad).rewards, curve_of(bad).wall_s) == (3, (0.25, 0.5), 4.0)
    passed = invoke(app, ["compare", str(good[0]), str(file)])
    assert passed.exit_code == 0 and "within" in passed.output and "2 reference runs" in passed.output
    failed = invoke(app, ["compare", str(bad), str(good[1]), "--json"])
    assert failed.exit_code == 1
    assert [point["verdict"] for point in json.loads(failed.output)["points"]] == ["within", "below"]


def run_on_users(root: Path, rewards: Sequence[float]) -> Path:
    """Write a run on users' conversations with these rewards, and three conversations that do not count."""
    root.mkdir()
    tree = {"seed": 1, "trainer": {"steps": 100}, "store": {"url": None}, "data": {"traffic": True}}
    (root / "config.yaml").write_text(yaml.safe_dump(tree))
    row = {"step": 1, "time": 9.0, "reward_mean": 0.2, "step_s": 2.0, "episodes": 64}
    (root / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with Store.open(root / "store.db") as store:

        def converse(name: str, status: EpisodeStatus | None, reward: float | None) -> None:
            store.open_episode(NewEpisode(name, f"hash of {name}", None, implicit_key=name)).result()
            if reward is not None:
                store.set_rewards(name, [Reward("episode", "", "thumb", reward)]).result()
            if status is not None:
                store.seal(name, status).result()

        for number, reward in enumerate(rewards):
            converse(f"rated-{number}", "finished", reward)
        converse("open", None, 1.0)
        converse("failed", "failed", 1.0)
        converse("silent", "finished", None)
    return root


def test_runs_on_users_conversations_are_compared_by_the_rewards_of_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "RATED", 10)
    learns = [0.0, 1.0] * 5 + [1.0] * 10 + [0.0] * 9
    good = [run_on_users(tmp_path / f"good{n}", learns) for n in range(3)]
    bad = run_on_users(tmp_path / "bad", [0.0, 1.0] * 5 + [0.0] * 10)
    short = run_on_users(tmp_path / "short", [1.0] * 9)
    assert curve_of(good[0]).points == (Evaluated(10, 0.5, 10), Evaluated(20, 1.0, 10))
    file = tmp_path / "reference.json"
    invoke = CliRunner().invoke
    written = invoke(app, ["reference", str(file), *map(str, good)])
    assert written.exit_code == 0 and f"{OF_USERS} at the end 1.000, 1.000, 1.000" in written.output
    assert curves_in(file) == [curve_of(run) for run in good]
    failed = invoke(app, ["compare", str(bad), str(file), "--json"])
    assert failed.exit_code == 1
    assert [point["verdict"] for point in json.loads(failed.output)["points"]] == ["within", "below"]
    assert "conversation" in invoke(app, ["compare", str(good[0]), str(file)]).output
    with pytest.raises(ConfigError, match="short has fewer than 10 rated conversations"):
        raise invoke(app, ["reference", str(file), str(short)]).exception
    held_out = run_folder(tmp_path / "held-out", before=0.3, after=0.9)
    with pytest.raises(ConfigError, match="is its held-out reward, and that of good0 its reward of each"):
        raise invoke(app, ["compare", str(held_out), str(file)]).exception


def reference_with(**changed: object) -> str:
    """The content of a reference file whose only evaluation has the `changed` fields."""
    point = {"step": 5, "reward": 0.5, "episodes": 10, **changed}
    run = {"name": "a", "seed": 0, "rewards": [0.5], "measured": HELD_OUT, "points": [point], "wall_s": 1.0}
    return json.dumps({"format": 2, "runs": [run]})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no"),
        ("{", "not a reference file"),
        ('{"format": 9}', "has the format 9"),
        ("[]", "not a"),
        ("[" * 100_000, "not a reference file"),
        (reference_with(reward=math.nan), "a reward must be a finite number, got nan"),
        (reference_with(reward="0.5"), "a reward must be a finite number, got '0.5'"),
        (reference_with(episodes=0), "episodes at least 1"),
        (reference_with(step="5"), "step and episodes must be integers"),
    ],
)
def test_a_file_that_is_not_a_reference_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "reference.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        curves_in(file)
