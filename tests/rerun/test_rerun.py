"""Reruns of a small run that was resumed: they repeat its steps exactly, or use other settings."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sqlite3
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.cli import app
from areal_agents.config import Config, save_config, validate_config
from areal_agents.errors import ConfigError, TrainingError
from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.inspection.why import why
from areal_agents.launch.run_folder import RunFolder
from areal_agents.rerun.comparison import side_by_side
from areal_agents.store import Store
from areal_agents.store.read_only import ReadOnlyStore
from areal_agents.training.batches.stored_steps import StoredSteps
from areal_agents.training.checkpoint.resuming import Start
from areal_agents.training.records.files import read_records
from areal_agents.training.run import run as train
from areal_agents.view.episodes import shown_episode
from areal_agents.view.runs import Runs
from areal_agents.view.steps import shown_step

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from training_support import build_model, record_groups  # noqa: E402

REWARDS = '''
def first(episode):
    """1 for the first episode of each group."""
    return float(episode.id.endswith("-0"))


def turns(episode):
    return {f"{episode.id}-0": 0.25, f"{episode.id}-1": 0.5}


def broken(episode):
    raise RuntimeError("no grader")


def elsewhere(episode):
    return {"chatcmpl-0123456789abcdef01234567": 1.0}
'''
SETTINGS: dict[str, Any] = {
    "data": {"path": "tasks.jsonl"},
    "agent": "agent.py:play",
    "rollout": {"groups": 2, "group_size": 2, "max_staleness": 1},
    "algorithm": {"minibatches": 2},
    "trainer": {
        "steps": 4,
        "lr": 1e-2,
        "schedule": "linear",
        "threads": 1,
        "checkpoint_every": 1,
        "keep_checkpoints": 9,
        "trackers": [],
        "publish": {"verify": "off"},
    },
}


@dataclass(frozen=True)
class Trained:
    """The folder of a run of four steps, its configuration, and reward functions beside it."""

    run: Path
    config: Config
    rewards: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """The run got no batch after step 2 and was resumed, so its versions are 0, 1, 2 and then 3, 4, 5."""
    home = tmp_path_factory.mktemp("rerun")
    run, model = home / "run", build_model(home / "model")
    (home / "rewards.py").write_text(REWARDS)
    config = validate_config({**SETTINGS, "model": str(model), "run_dir": str(run)}, source="the test")
    with (
        RunFolder(run).locked(),
        running_engine(model, kernel="torch", threads=1, slots=16, max_context=256) as url,
        Store.open(run / "store.db") as store,
    ):

        def go_on(wait_s: float) -> None:
            train(
                config.trainer.model_copy(update={"batch_timeout_s": wait_s}),
                config.algorithm,
                store=store,
                engines=[SGLangEngine(url, control_timeout_s=30)],
                model_path=model,
                run_dir=run,
                groups=2,
                max_staleness=config.rollout.max_staleness,
                stop=threading.Event(),
            )

        record_groups(store, url, ["a", "b", "c", "d"], size=2)
        with pytest.raises(TrainingError, match="step 3 did not get 2 complete groups"):
            go_on(wait_s=0.1)
        record_groups(store, url, ["e", "f", "g", "h"], size=2)  # sampled by version 2
        go_on(wait_s=60.0)
    save_config(config, run / "config.yaml")
    yield Trained(run, config, home / "rewards.py")


def rerun(trained: Trained, *arguments: str) -> dict[str, Any]:
    """Run the command with --json; return what it prints."""
    given = ["rerun", str(trained.run), *arguments, "--json"]
    done = CliRunner().invoke(app, given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def train_again(
    trained: Trained,
    run_dir: Path,
    algorithm: dict[str, Any],
    *,
    checkpoint: Path | None,
    step: int,
    until: int,
    version: int | None = None,
) -> list[dict[str, Any]]:
    """Rerun steps in this process; return the metrics."""
    store = ReadOnlyStore(trained.run / "store.db")
    stored = StoredSteps.read(store, max_staleness=trained.config.rollout.max_staleness)
    start = Start(checkpoint, step, stored.steps[step + 1].version if version is None else version, until)
    with Store.open(run_dir / "store.db") as own:
        result = train(
            trained.config.trainer,
            AlgorithmConfig.model_validate(algorithm),
            store=own,
            engines=(),
            model_path=trained.config.model,
            run_dir=run_dir,
            groups=2,
            max_staleness=trained.config.rollout.max_staleness,
            stop=threading.Event(),
            start=start,
            stored=stored,
        )
    store.close()
    assert result.finished and result.step == until
    return rows_of(run_dir)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "final" / "model.safetensors").read_bytes()


def files(folder: Path) -> dict[str, str]:
    """A digest of each file in a folder, except those that SQLite creates while a store is read."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".db-shm" and path.stat().st_size
    }


def test_a_rerun_without_changes_gives_the_results_of_the_run(trained: Trained, tmp_path: Path) -> None:
    before = files(trained.run)
    found = rerun(trained, "--steps", "1:", "--out", str(tmp_path / "again"))
    again = Path(found["rerun"])
    assert files(trained.run) == before  # the run is only read
    assert weights(again) == weights(trained.run) != weights_of_model(trained)
    assert [pair["step"] for pair in found["steps"]] == [2, 3, 4]
    for pair in found["steps"]:
        assert pair["original"] == pair["rerun"]
        assert pair["rerun"]["grad_norm"] > 0 and pair["rerun"]["tokens"] > 0
    assert [pair["rerun"]["staleness_mean"] for pair in found["steps"]] == [1, 0, 1]  # across the resume
    rates = {row["step"]: row["lr"] for row in rows_of(trained.run)}
    assert rates[2] != rates[3] and {row["step"]: row["lr"] for row in rows_of(again)} == {
        step: rates[step] for step in (2, 3, 4)
    }
    record = json.loads((again / "rerun.json").read_text())
    assert (record["run"], record["step"], record["until"]) == (str(trained.run), 1, 4)
    assert record["checkpoint"] == str(trained.run / "checkpoints" / "step-1")
    assert record["changes"] == [] and record["new_rewards"] is False


def weights_of_model(trained: Trained) -> bytes:
    return (Path(trained.config.model) / "model.safetensors").read_bytes()


def test_the_same_changes_give_the_same_weights(trained: Trained, tmp_path: Path) -> None:
    settings = {"preset": "gspo", "minibatches": 2}
    first, second = (
        train_again(trained, tmp_path / name, settings, checkpoint=None, step=0, until=2) for name in "ab"
    )
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(trained.run)
    assert all(pair.is_same for pair in side_by_side(first, second))
    original = rows_of(trained.run)
    assert first[0]["reward_mean"] == original[0]["reward_mean"]  # the episodes are those of the run
    assert first[0]["kl_behavior_k3"] != original[0]["kl_behavior_k3"]
    # The first step has the same weights and another loss; afterwards the proximal policy differs as well.
    assert first[1]["weight_raw_mean"] != original[1]["weight_raw_mean"]


def test_new_rewards_replace_all_recorded_ones(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "rewarded"
    reward = f"reward={trained.rewards}:first"
    found = rerun(trained, reward, "algorithm.minibatches=1", "--steps", "2:3", "--out", str(out))
    (pair,) = found["steps"]
    assert pair["original"]["reward_mean"] != pair["rerun"]["reward_mean"] == 0.5
    assert pair["rerun"]["rewards_by_name"] == {"return": 0.5}
    records = read_records(out, steps=[3])
    assert {record.episode_id for record in records} == {"e-0", "e-1", "f-0", "f-1"}
    expected = 0.5 / (np.sqrt(0.5) + 1e-5)  # the scores of each group are 1 and 0
    for record in records:
        sign = 1 if record.episode_id.endswith("-0") else -1
        assert record.values["advantage"] == pytest.approx(sign * expected, rel=1e-6)
    explained = why(out, "e-0", 1, 0)
    terms = {term["name"]: term["value"] for term in explained["steps"][0]["path"]}
    assert explained["episode"]["score"] == terms["score"] == 1 and terms["baseline"] == 0.5
    assert explained["steps"][0]["turns"][0]["advantage"]["agrees"] is True
    with Store.open(trained.run / "store.db") as store:  # the run keeps its own rewards
        assert store.load_episode("e-0").score not in (0, 1)


def test_rewards_of_turns_replace_those_of_their_episode(trained: Trained, tmp_path: Path) -> None:
    store = ReadOnlyStore(trained.run / "store.db")
    from areal_agents.core.rollout import Reward

    of_turns = {"a-0": (Reward("turn", "a-0-1", "return", 2.0),)}
    stored = StoredSteps.read(store, max_staleness=None, rewards=of_turns)
    a, b = stored.groups(stored.steps[1])
    assert [rollout.episode.score for rollout in a.rollouts][0] == 2
    assert a.rollouts[1].episode.rewards and b.rollouts[0].episode.rewards  # others keep their rewards
    wrong = StoredSteps.read(store, max_staleness=None, rewards={"a-0": (Reward("turn", "b-0-1", "x", 1.0),)})
    with pytest.raises(TrainingError, match="a reward for b-0-1, which is not one of its turns"):
        wrong.groups(wrong.steps[1])
    store.close()


def test_a_critic_begins_anew_if_the_checkpoint_has_none(trained: Trained, tmp_path: Path) -> None:
    checkpoint = trained.run / "checkpoints" / "step-2"
    (row,) = train_again(trained, tmp_path / "ppo", {"preset": "ppo"}, checkpoint=checkpoint, step=2, until=3)
    (original,) = (known for known in rows_of(trained.run) if known["step"] == 3)
    assert row["value_loss"] > 0 and original["value_loss"] is None
    # The policy is that of the checkpoint, so the first pass computes the same logprobs as the run.
    assert row["weight_raw_mean"] == pytest.approx(original["weight_raw_mean"], rel=1e-6)
    (without,) = train_again(
        trained, tmp_path / "back", {"minibatches": 2},
        checkpoint=tmp_path / "ppo" / "checkpoints" / "step-3", step=3, until=4,
    )  # fmt: skip
    assert without["value_loss"] is None and without["step"] == 4


def test_the_page_shows_a_rerun_beside_its_run(trained: Trained, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(trained.run, root / "run")
    moved = Trained(root / "run", trained.config, trained.rewards)
    changes = ["algorithm.clip_high=0.5", f"reward={trained.rewards}:first"]
    found = rerun(moved, *changes, "--steps", "3:4")
    assert Path(found["rerun"]) == root / "run-rerun-3-4"  # beside the run
    runs = Runs(root)
    states = {run.name: run.state() for run in runs.all()}
    assert "rerun" not in states["run"]
    state = states["run-rerun-3-4"]
    assert (state["state"], state["step"]) == ("finished", 4)
    assert state["rerun"]["name"] == "run" and state["rerun"]["changes"] == changes
    again = runs.get("run-rerun-3-4")
    assert [row["step"] for row in again.rows()] == [4]
    shown = shown_step(again, 4)
    assert [group.id for group in shown["groups"]] == ["g", "h"] and shown["metrics"]["step"] == 4
    assert [[episode.score for episode in group.episodes] for group in shown["groups"]] == [[1, 0]] * 2
    episode = shown_episode(again, "g-0")
    assert (episode["score"], episode["rewards"][0]["value"]) == (1, 1)
    assert shown_episode(runs.get("run"), "g-0")["score"] not in (0, 1)
    folder = str(root / "run-rerun-3-4")
    refused = {
        "is a rerun, without episodes of its own; rerun .*/run instead": ["rerun", folder, "--steps", "3:4"],
        "has a rerun, which is not continued": ["train", f"{folder}/config.yaml"],
        "has no episodes of its own; name .*/run": ["reward", "g-0", "1", folder],
    }
    for message, command in refused.items():
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, command, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout.groups=3"], "rollout.groups cannot be changed in a rerun: a rerun plays no episodes"),
        (["agent=other.py:agent"], "agent cannot be changed in a rerun: a rerun plays no episodes"),
        (["data.path=x.jsonl"], "data.path cannot be changed"),
        (["engine.slots=4"], "engine.slots cannot be changed in a rerun: a rerun starts no engine"),
        (["trainer.publish.verify=off"], "publishes no weights"),
        (
            ["trainer.steps=9"],
            "trainer.steps cannot be changed in a rerun: --steps says where the rerun ends",
        ),
        (["trainer.memory_check=warn"], "does not decide what is learned"),
        (["eval.episodes=3"], "evaluate its weights with areal-agents eval"),
        (["algorithm.replay=recent"], "the groups of each batch are those of the run"),
        (["algorithm.preset=ppo"], "give algorithm=… instead"),
        (["algorithm.clip_hgh=0.3"], "clip_high"),
        (["reward=null"], "name the function to use"),
        (["trainer.lora.rank=4"], "trainer.lora: the checkpoint of step 1 was written with another"),
        (["trainer.optimizer=muon"], "trainer.optimizer: the checkpoint of step 1"),
        (
            [
                "algorithm.policy_loss=distillation",
                "algorithm.teacher=engine",
                "trainer.teacher_url=http://x",
            ],
            "a rerun calls no server",
        ),
        (["--steps", "1-2"], "expected A:B"),
        (["--steps", "2:2"], "2:2 has no step"),
        (
            ["--steps", "7:9"],
            "has no checkpoint of step 7; it has those of steps 1 to 4, and step 0 is the initial model",
        ),
        (["--steps", "3:9"], "has not trained step 5; it has trained steps 1 to 4"),
        (["--out", "."], "exists and is not an empty folder"),
    ],
)
def test_a_rerun_that_is_not_possible_is_refused(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)
    steps = [] if "--steps" in arguments else ["--steps", "1:2"]
    with pytest.raises(ConfigError) as refused:
        rerun(trained, *steps, *arguments)
    assert message in str(refused.value)
    assert [path.name for path in trained.run.parent.iterdir() if "-rerun-" in path.name] == []


def test_rewards_that_cannot_be_computed_are_an_error(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"failed on 4 of 4 episodes; the first: .*no grader"):
        rerun(trained, f"reward={trained.rewards}:broken", "--steps", "1:2", "--out", str(out))
    assert not out.exists()


def test_a_run_that_is_running_is_not_rerun(trained: Trained) -> None:
    with open(trained.run / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is running; rerun it when it has ended"):
            rerun(trained, "--steps", "1:2")


def test_steps_whose_turns_were_removed_are_not_rerun(trained: Trained, tmp_path: Path) -> None:
    run = shutil.copytree(trained.run, tmp_path / "run")
    with sqlite3.connect(run / "store.db") as connection:
        connection.execute("update turns set codec = 0, token_ids = x'' where id = 'c-1-0'")
    emptied = Trained(run, trained.config, trained.rewards)
    with pytest.raises(
        ConfigError, match=r"turns of step 2 were removed .*\(store\.retain\).*steps 1, 3 and 4 still"
    ):
        rerun(emptied, "--steps", "1:4")


def test_a_run_on_recorded_episodes_is_not_rerun(trained: Trained, tmp_path: Path) -> None:
    run = tmp_path / "offline"
    with RunFolder(run).locked():
        pass
    recorded = {**SETTINGS, "agent": "", "data": {"episodes": str(trained.run)}, "loop": "async"}
    save_config(
        validate_config({**recorded, "model": trained.config.model, "run_dir": str(run)}, source="the test"),
        run / "config.yaml",
    )
    with pytest.raises(ConfigError, match=r"recorded episodes \(data\.episodes\).*areal-agents train"):
        rerun(Trained(run, trained.config, trained.rewards), "--steps", "1:2")


@pytest.mark.slow
def test_a_rerun_on_several_ranks_gives_the_same_loss(trained: Trained, tmp_path: Path) -> None:
    found = rerun(trained, "trainer.ranks=2", "--steps", "2:4", "--out", str(tmp_path / "ranks"))
    for pair in found["steps"]:
        assert pair["rerun"]["tokens"] == pair["original"]["tokens"]
        assert pair["rerun"]["loss"] == pytest.approx(pair["original"]["loss"], abs=1e-5)
