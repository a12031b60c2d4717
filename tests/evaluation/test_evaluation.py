"""Evaluations by the command, with the quick-start model: killed, continued, refused and compared."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.evaluation.comparison import compare
from areal_agents.evaluation.results import AttemptResult, Results, TaskResult, field_of_tasks
from areal_agents.store import Store
from areal_agents.training.batches.recorded import RecordedGroups

NAMES = ("Neon", "Tin", "Iron", "Zinc")
START_S = 250.0


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, its agent and its tasks."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(Path(__file__).parent / "evaluated_agent.py", folder / "agent.py")
    rows = [
        {"id": f"t{n}", "question": f"What is the symbol of {name}?", "about": {"level": n % 2}}
        for n, name in enumerate(NAMES)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        "model: quickstart\nagent: agent.py:agent\ndata: {path: tasks.jsonl}\n"
        "eval: {data: {path: tasks.jsonl}, attempts: 3, temperature: 1.0, answer: 'agent.py:answer'}\n"
    )
    (folder / "played.txt").touch()
    return folder


def command(project: Path, *more: str) -> list[str]:
    out = str(project / "out")
    return [sys.executable, "-m", "areal_agents", "eval", str(project / "config.yaml"), "--out", out, *more]


@pytest.fixture(scope="module")
def evaluated(project: Path) -> Path:
    """The folder of an evaluation that was killed after a part of its episodes, and then continued."""
    played = project / "played.txt"
    (project / "hold").touch()
    with open(project / "first.log", "wb") as log:
        first = subprocess.Popen(command(project), cwd=project, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while len(played.read_text().splitlines()) < 4 or len(_scored(project)) < 4:
            assert first.poll() is None and time.monotonic() < deadline, (project / "first.log").read_text()
            time.sleep(0.1)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait(30)
    (project / "hold").unlink()
    before = _scored(project)
    subprocess.run(
        command(project, "--by", "about.level"), cwd=project, check=True, timeout=START_S, capture_output=True
    )
    after = _scored(project)
    assert before.items() <= after.items(), "an episode that had ended was played again"
    return project / "out"


def _scored(project: Path) -> dict[str, tuple[str, int]]:
    """The task and the attempt of each scored episode, by its id."""
    path = project / "out" / "store.db"
    if not path.exists():
        return {}
    with Store.open(path) as store:
        found = [e for e in store.episodes(split="eval") if e.status == "finished"]
    return {e.id: (e.task_id, e.metadata["attempt"]) for e in found}


def test_an_evaluation_continues_after_kill_9(evaluated: Path) -> None:
    scored = Counter(_scored(evaluated.parent).values())
    assert scored == Counter({(f"t{n}", k): 1 for n in range(4) for k in range(3)})
    results = Results.read(evaluated)
    assert [task.id for task in results.tasks] == [
        t["id"] for t in json.loads((evaluated / "tasks.json").read_text())
    ]
    for task in results.tasks:
        for attempt in task.attempts:
            assert attempt.status == "finished" and attempt.turns == 1 and attempt.seconds > 0
            assert 1 <= attempt.sampled_tokens <= 6 and attempt.prompt_tokens > 5
            assert attempt.answer is None or attempt.score == float(int(attempt.answer) % 2 == 0)
            assert attempt.versions == (0, 0)


def test_metrics_are_those_of_the_attempts(evaluated: Path) -> None:
    results = Results.read(evaluated)
    metrics = results.metrics()
    assert list(metrics.scores) == ["avg@3", "pass@1", "pass@2", "pass@3", "pass^2", "pass^3", "maj@3"]
    scores = [attempt.score for task in results.tasks for attempt in task.attempts]
    assert metrics.scores["avg@3"].value == pytest.approx(sum(scores) / 12)
    solved = sum(any(attempt.score for attempt in task.attempts) for task in results.tasks)
    assert metrics.scores["pass@3"].value == solved / 4
    always = sum(all(attempt.score for attempt in task.attempts) for task in results.tasks)
    assert metrics.scores["pass^3"].value == always / 4
    by_level = results.slices()["about.level"]
    assert {value: found.tasks for value, found in by_level.items()} == {"0": 2, "1": 2}
    tree = json.loads((evaluated / "results.json").read_text())
    assert tree["metrics"]["scores"]["pass@3"]["value"] == solved / 4


def test_episodes_that_have_ended_are_not_played_again(evaluated: Path) -> None:
    played = (evaluated.parent / "played.txt").read_text()
    done = subprocess.run(
        command(evaluated.parent, "--json"), cwd=evaluated.parent, check=True, timeout=60, capture_output=True
    )
    assert json.loads(done.stdout)["tasks"] == 4
    assert (evaluated.parent / "played.txt").read_text() == played


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("eval.attempts=2", "config.eval.attempts"),
        ("rollout.limits.max_turns=3", "config.rollout.limits.max_turns"),
        ("--model", "model"),
        ("eval.temperature=0", "set eval.temperature above 0"),
    ],
)
def test_an_evaluation_with_other_settings_is_refused_in_the_folder(
    evaluated: Path, change: str, named: str
) -> None:
    arguments = ["eval", str(evaluated.parent / "config.yaml"), "--out", str(evaluated)]
    if change == "--model":
        other = evaluated.parent / "other"
        shutil.copytree(Path(__file__).parents[2] / "examples" / "search_agent" / "model", other)
        weights = next(other.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
        arguments += ["--model", str(other)]
    else:
        arguments.append(change)
    with pytest.raises(ConfigError, match=named):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_changed_tasks_are_refused(evaluated: Path) -> None:
    from areal_agents.core.rollout import Task
    from areal_agents.evaluation.folder import EvaluationFolder

    files = EvaluationFolder(evaluated)
    tasks = files.read_tasks()
    files.keep_tasks(tasks)
    with pytest.raises(ConfigError, match="the first that differs is t"):
        files.keep_tasks([Task(tasks[0].id, {"question": "Other?"}), *tasks[1:]])
    with pytest.raises(ConfigError, match="4 became 3"):
        files.keep_tasks(tasks[:3])


def test_a_folder_of_something_else_is_refused(evaluated: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    arguments = ["eval", str(evaluated.parent / "config.yaml"), "--out", str(tmp_path)]
    with pytest.raises(ConfigError, match="is not the folder of an evaluation"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("RUN", "say which of its weights: RUN@final"),
        ("RUN@final", "RUN has no final model"),
        ("RUN@7", "RUN has no checkpoint of step 7; it has no checkpoint"),
        ("RUN@best", "RUN has no checkpoint"),
        ("RUN@last", "expected RUN@final, RUN@best or RUN@STEP"),
    ],
)
def test_weights_that_a_run_does_not_have_are_refused(
    evaluated: Path, tmp_path: Path, given: str, message: str
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    arguments = ["eval", str(evaluated.parent / "config.yaml"), "--model", given.replace("RUN", str(run))]
    with pytest.raises(ConfigError) as raised:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert message in str(raised.value).replace(str(run), "RUN")


def rescored(evaluated: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run `rescore`; return what it writes and what it prints."""
    file = evaluated.parent / "rescored.json"
    file.unlink(missing_ok=True)
    given = ["rescore", str(evaluated), *arguments, "--out", str(file)]
    printed = CliRunner().invoke(app, given, catch_exceptions=False).output
    return json.loads(file.read_text()), printed


def test_rewards_are_recomputed_without_a_model(evaluated: Path) -> None:
    before = Results.read(evaluated)
    found, printed = rescored(evaluated, f"reward={evaluated.parent}/agent.py:length", "--workers", "2")
    old = {a.episode: a for task in before.tasks for a in task.attempts}
    assert len(found["episodes"]) == 12 and found["failed"] == 0
    for row in found["episodes"]:
        attempt = old[row["episode"]]
        assert row["old"] == attempt.score and row["new"] == float(attempt.answer or 0)
    assert found["mean_new"] == pytest.approx(sum(row["new"] for row in found["episodes"]) / 12)
    assert f"{found['mean_new']:.3f}" in printed
    with Store.open(evaluated / "store.db") as store:  # the store keeps the old rewards
        assert {e.id: e.score for e in store.episodes(split="eval") if e.id in old} == {
            id: attempt.score for id, attempt in old.items()
        }


def test_calls_that_fail_do_not_affect_other_calls(evaluated: Path) -> None:
    reward = f"reward={evaluated.parent}/agent.py:fails_on_t1"
    found, printed = rescored(evaluated, reward, "reward.time_s=60", "--workers", "2")
    by_task: dict[str, list[Any]] = {}
    for row in found["episodes"]:
        by_task.setdefault(row["task"], []).append(row)
    assert all("LookupError: no such rubric: \ud800" in row["error"] for row in by_task["t1"])
    assert all(row["error"] == "the function ended its process" for row in by_task["t2"])
    assert found["failed"] == 6 and "the function failed on 6 episodes" in printed
    for row in by_task["t0"] + by_task["t3"]:  # the function receives the agent's reward
        assert row["rewards"] == {"told": row["old"], "extra": 0.5} and row["new"] == row["old"] + 0.5


def test_a_call_that_exceeds_its_time_limit_is_ended_and_does_not_affect_other_calls(evaluated: Path) -> None:
    """One of the two workers gets a second call, so its process has to be replaced after the first."""
    reward = f"reward={evaluated.parent}/agent.py:hangs"
    found, printed = rescored(evaluated, reward, "reward.time_s=0.5", "--task", "t3", "--workers", "2")
    assert len(found["episodes"]) == found["failed"] == 3
    assert all("did not return within 0.5 s" in row["error"] for row in found["episodes"])
    assert "the function failed on 3 episodes" in printed


def test_rewards_that_are_too_large_are_errors_of_their_episodes(evaluated: Path) -> None:
    found, printed = rescored(evaluated, f"reward={evaluated.parent}/agent.py:enormous_on_t0")
    errors = [row["error"] for row in found["episodes"] if row["task"] == "t0"]
    assert len(errors) == found["failed"] == 3 and found["mean_new"] == 1.0
    assert all("must be from -1e+12 to 1e+12, got 1e+308" in error for error in errors)
    assert "the function failed on 3 episodes" in printed


def test_the_interval_of_a_rescoring_is_that_of_the_difference_of_its_means(evaluated: Path) -> None:
    """There is one episode of t0 and three of each other task, so a mean over episodes would differ."""
    reward = f"reward={evaluated.parent}/agent.py:fails_after_one_of_t0"
    found, _ = rescored(evaluated, reward, "--workers", "1")
    assert found["failed"] == 2
    assert found["mean_new"] == (5.0 + 1.0 + 1.0 + 1.0) / 4
    gain = found["mean_new"] - found["mean_old"]
    assert found["low"] < gain < found["high"]
    assert gain == pytest.approx((found["low"] + found["high"]) / 2)


def test_a_field_that_tasks_lack_is_refused_before_anything_is_played(
    evaluated: Path, tmp_path: Path
) -> None:
    played = (evaluated.parent / "played.txt").read_text()
    runs = tmp_path / "runs"
    config = str(evaluated.parent / "config.yaml")
    arguments = ["eval", config, f"run_dir={runs / 'r'}", "eval.attempts=1", "--by", "level"]
    with pytest.raises(ArealAgentsError, match="--by level: task t. has no such field; it has "):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert (evaluated.parent / "played.txt").read_text() == played
    assert (runs / "r-eval" / "config.yaml").exists()  # kept, because the evaluation failed
    assert "no runs in" in CliRunner().invoke(app, ["runs", str(runs)], catch_exceptions=False).output


def test_a_function_of_groups_gets_single_episodes_outside_of_groups(evaluated: Path) -> None:
    found, _ = rescored(evaluated, f"reward.group={evaluated.parent}/agent.py:ranks", "--task", "t0")
    assert [row["new"] for row in found["episodes"]] == [1.0] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the run has no reward function; name one"),
        (["reward=missing.py:score"], "there is no file"),
        (["trainer.steps=1"], "expected reward="),
        (["reward=agent.py:length", "--split", "train"], "has no finished or truncated episode to rescore"),
    ],
)
def test_a_rescoring_that_is_not_possible_is_refused(
    evaluated: Path, arguments: list[str], message: str
) -> None:
    given = [a.replace("agent.py", f"{evaluated.parent}/agent.py") for a in arguments]
    with pytest.raises(ArealAgentsError, match=message):
        CliRunner().invoke(app, ["rescore", str(evaluated), *given], catch_exceptions=False)


def test_collected_episodes_are_groups_to_train_on(project: Path, tmp_path: Path) -> None:
    """They are training episodes of the tasks in `data`, unlike the episodes of an evaluation."""
    given = ["collect", str(project / "config.yaml"), "--out", str(tmp_path / "groups"), "--tasks", "2"]
    collect = [sys.executable, "-m", "areal_agents", *given]
    done = subprocess.run(
        [*collect, "-k", "2"], cwd=project, check=True, timeout=START_S, capture_output=True, text=True
    )
    assert "4 episodes in" in done.stdout and f"data.episodes={tmp_path / 'groups'}" in done.stdout
    with Store.open(tmp_path / "groups" / "store.db") as store:
        groups = RecordedGroups.read(store, seed=0)
        assert [len(group.episodes) for group in groups.groups] == [2, 2]
        loaded = groups.load(groups.groups)
        turns = [t for g in loaded for r in g.rollouts for t in r.episode.turns]  # type: ignore[union-attr]
    assert turns and all(t.sampling.temperature == 1 and not t.constrained for t in turns)
    with pytest.raises(ConfigError, match="is the evaluation of something else; it differs in .*split"):
        arguments = [*command(project)[3:-1], str(tmp_path / "groups")]
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    for change, message in (
        (["--temperature", "0.5"], "sampled at temperature 1, as in training"),
        (["eval=null", f"data.episodes={tmp_path / 'groups'}"], "episodes that are recorded already"),
        (["--endpoint", "http://x/v1"], "--endpoint needs --model"),
        (["--endpoint", "http://x/v1", "--model", "m", "-k", "2", "--temperature", "0"], "above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, [*given, *change], catch_exceptions=False)


def results(scores: dict[str, list[float]], **changes: Any) -> Results:
    """Results with these scores by task."""
    count = len(next(iter(scores.values())))

    def attempt(index: int, score: float) -> AttemptResult:
        return AttemptResult("e", index, "finished", score, {}, 2, 10, 100, 1.5)

    tasks = tuple(
        TaskResult(id, tuple(attempt(i, score) for i, score in enumerate(found)))
        for id, found in scores.items()
    )
    settings = {"name": "n", "model": "m", "temperature": 1.0, "pass_score": 1.0, "has_answers": False}
    return Results(**{**settings, **changes}, attempts=count, tasks=tasks)


def test_two_evaluations_are_paired_by_task(tmp_path: Path) -> None:
    before = results({"a": [0.0], "b": [0.0], "c": [1.0], "d": [0.0], "only-before": [1.0]})
    after = results({"a": [1.0], "b": [1.0], "c": [1.0], "d": [1.0], "only-after": [0.0]})
    found = compare(before, after)
    assert (found.common, found.only_first, found.only_second) == (4, ("only-before",), ("only-after",))
    average = found.differences[0]
    assert (average.metric, average.first, average.second) == ("avg@1", 0.25, 1.0)
    assert (average.better, average.worse) == (3, 0)
    assert average.test == "exact McNemar test" and average.p == 2 / 8
    # mean 0.75, standard error 0.25, t(0.975; 3) = 3.182446305284263
    assert (average.low, average.high) == pytest.approx((0.75 - 0.7956115763, 0.75 + 0.7956115763))
    for name, given in (("a", before), ("b", after)):
        given.write(tmp_path / f"{name}.json")
    printed = CliRunner().invoke(
        app, ["eval", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")], catch_exceptions=False
    )
    assert "only in A, and not compared: only-before" in printed.output
    assert "+0.750" in printed.output and "exact McNemar test" in printed.output


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    """These are the settings in the results and, if both evaluations have their folders, all others."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, temperature, turns in ((one, 0.0, 8), (other, 1.0, 3)):
        folder.mkdir()
        results({"a": [0.0], "b": [1.0]}, temperature=temperature).write(folder / "results.json")
        config = {"eval": {"temperature": temperature}, "rollout": {"limits": {"max_turns": turns}}}
        identity = {
            "config": config,
            "model": str(folder),
            "ablate_tool": False,
            "sources": {"agent": {"a.py": turns}},
        }
        (folder / "evaluation.json").write_text(json.dumps(identity))

    def printed() -> str:
        return (
            CliRunner().invoke(app, ["eval", "compare", str(one), str(other)], catch_exceptions=False).output
        )

    above = printed().split("metric")[0]
    assert "eval.temperature differs: 0.0 in A, 1.0 in B" in above
    assert "rollout.limits.max_turns differs: 8 in A, 3 in B" in above
    assert "the agent differs in its files" in above and "model" not in above
    (other / "evaluation.json").unlink()
    above = printed().split("metric")[0]
    assert "eval.temperature differs: 0.0 in A, 1.0 in B" in above and "max_turns" not in above


def test_numbers_of_attempts_may_differ() -> None:
    found = compare(results({"a": [0.0], "b": [1.0]}), results({"a": [0.0, 1.0], "b": [1.0, 1.0]}))
    assert [d.metric for d in found.differences] == ["avg", "pass@1"]
    assert found.differences[0].second == 0.75
    assert found.differences[0].test == "paired permutation test"


def test_evaluations_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ConfigError, match="no task in common"):
        compare(results({"a": [0.0]}), results({"b": [0.0]}))
    with pytest.raises(ConfigError, match=r"differ in eval.pass_score"):
        compare(results({"a": [0.0]}), results({"a": [0.0]}, pass_score=0.5))


def test_fields_of_tasks_are_found_by_their_path() -> None:
    tasks = {"a": {"x": {"y": 3}, "z": [1]}, "b": {"x": {"y": "three"}, "z": [1]}}
    assert field_of_tasks(tasks, "x.y") == {"a": "3", "b": "three"}
    with pytest.raises(ConfigError, match="task a has no such field; it has x, z"):
        field_of_tasks(tasks, "level")
    with pytest.raises(ConfigError, match="got a list in task a"):
        field_of_tasks(tasks, "z")
