"""The real trackers without a network: a run and its resumption, and failures that do not end the run."""

from __future__ import annotations

import logging
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import wandb
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage
from wandb.proto.wandb_internal_pb2 import Record

from areal_agents.errors import ConfigError
from areal_agents.training.metrics.trackers import Trackers

CONFIG = {"trainer": {"lr": 1e-3}}
LIVES = (({1: 0.5, 2: 0.25, 3: 9.0}, 0), ({3: 0.125}, 2))  # the second one trains step 3 again


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder; the trackers write to it and beside it, without a network."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow, which takes seconds to make."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_folder(folder: Path, database: Path) -> Path:
    """The run's folder with an empty database where the tracker looks for one."""
    shutil.copyfile(database, folder / "mlflow.db")
    return folder


def one_life(folder: Path, names: Sequence[str], values: dict[int, float], after_step: int) -> None:
    trackers = Trackers(names, folder, after_step=after_step, config=CONFIG)
    for step, value in values.items():
        trackers.log({"policy/loss": value}, step=step)
    trackers.close()


def live(folder: Path, *names: str) -> None:
    """Log a run that was killed after step 3 and resumed after step 2."""
    for values, after_step in LIVES:
        one_life(folder, names, values, after_step)


def test_tensorboard_replaces_the_steps_that_are_trained_again(folder: Path) -> None:
    live(folder, "tensorboard")
    board = EventAccumulator(str(folder / "tb"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("policy/loss")] == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_mlflow_continues_in_the_same_run(mlflow_folder: Path) -> None:
    live(mlflow_folder, "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{mlflow_folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("areal-agents")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {"trainer.lr": "0.001"}
    history = client.get_metric_history(run.info.run_id, "policy/loss")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.25), (3, 9.0), (3, 0.125)]


def test_mlflow_accepts_any_name_of_a_reward(mlflow_folder: Path) -> None:
    trackers = Trackers(["mlflow"], mlflow_folder, after_step=0)
    trackers.log({"data/rewards_by_name/größe (%)": 1.0}, step=1)
    trackers.close()
    (run,) = MlflowClient(tracking_uri=f"sqlite:///{mlflow_folder / 'mlflow.db'}").search_runs(["1"])
    assert run.data.metrics == {"data/rewards_by_name/gr__e ___": 1.0}


def test_trackio_continues_in_the_same_run(folder: Path) -> None:
    live(folder, "trackio")
    (name,) = SQLiteStorage.get_runs("areal-agents")
    assert name.startswith("run-")
    logs = SQLiteStorage.get_logs("areal-agents", name)
    seen = [(entry["step"], entry["policy/loss"]) for entry in logs]
    assert seen == [(1, 0.5), (2, 0.25), (3, 9.0), (3, 0.125)]


def test_wandb_continues_in_the_same_run(folder: Path) -> None:
    one_life(folder, ["wandb"], *LIVES[0])
    (folder / "wandb").rename(folder / "wandb-1")  # its folders are named by the second
    one_life(folder, ["wandb"], *LIVES[1])
    wandb.teardown()  # as when a process exits: waits for the service that writes the files
    files = sorted(folder.glob("wandb*/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1  # the name is the run's id
    seen = []
    for file in files:
        for record in wandb_records(file):
            items = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
            if items:
                seen.append((int(items["step"]), float(items["policy/loss"])))
    assert seen == [(3, 0.125), (1, 0.5), (2, 0.25), (3, 9.0)]


def wandb_records(path: Path) -> Iterator[Record]:
    """The records of an offline run: a header of 7 bytes, then a LevelDB log in blocks of 32 KiB."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_a_tracker_that_fails_is_reported_once_and_the_others_continue(
    mlflow_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers(["mlflow", "tensorboard"], mlflow_folder, after_step=0)
    client = MlflowClient(tracking_uri=f"sqlite:///{mlflow_folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("areal-agents").experiment_id])  # type: ignore[union-attr]
    client.delete_run(run.info.run_id)
    for step in (1, 2, 3):
        trackers.log({"policy/loss": 1.0}, step=step)
    trackers.close()
    (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert (
        "tracker mlflow failed at step 1" in error.getMessage() and "Training continues" in error.getMessage()
    )
    assert "tracker mlflow has missed 3 steps" in caplog.text
    board = EventAccumulator(str(mlflow_folder / "tb"))
    board.Reload()
    assert [e.step for e in board.Scalars("policy/loss")] == [1, 2, 3]


def test_a_tracker_that_does_not_start_ends_a_new_run_but_not_a_resumed_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Trackers(["mlflow"], folder, after_step=0).close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    resumed = Trackers(["mlflow"], folder, after_step=1)
    resumed.log({"policy/loss": 1.0}, step=2)
    resumed.close()
    assert "mlflow does not start" in caplog.text and "Training continues without it" in caplog.text
    (folder.parent / "new").mkdir()
    with pytest.raises(ConfigError, match=r"trainer.trackers: mlflow does not start: .*or leave it out"):
        Trackers(["mlflow"], folder.parent / "new", after_step=0)


def test_a_tracker_that_is_not_installed_names_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb is not installed; pip install 'areal-agents\[trackers\]'"):
        Trackers(["wandb"], folder, after_step=0)
    with pytest.raises(ConfigError, match="expected some of tensorboard, wandb, trackio, mlflow, got 'aim'"):
        Trackers(["aim"], folder, after_step=0)


def test_trackers_that_are_not_named_are_not_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    live(folder, "tensorboard")
    assert not (folder / "trackers.json").exists()
