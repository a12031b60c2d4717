"""Sends copies of the metrics to trackers: TensorBoard, Weights & Biases, trackio, MLflow, by name.

metrics.jsonl remains the authoritative record. Each tracker is imported only when it is named and runs on its
own thread, so training never waits for it. A tracker's failure is reported once, at level error, and the run
continues.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from areal_agents.errors import ConfigError
from areal_agents.whole_files import write_whole

logger = logging.getLogger(__name__)

PROJECT = "areal-agents"  # used unless the tracker's environment variable sets another name
IDS = "trackers.json"
_CLOSE_TIMEOUT_S = 60.0
_EXTRAS = {"tensorboard": "train", "wandb": "trackers", "trackio": "trackers", "mlflow": "trackers"}


class Tracker(Protocol):
    """A destination of metrics. Both methods are called on the tracker's own thread; they may block and
    raise."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Log the values of one step, by name."""

    def close(self) -> None:
        """Send the remaining values."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The description of a run that a tracker receives.

    Attributes:
        folder: the folder of the run, whose name is the run's name; trackers write local files into it.
        after_step: the step after which the run resumes, 0 for a new one.
        id: the run's id in the tracker; None if the run was not tracked there before.
        config: settings to show beside the metrics.
    """

    folder: Path
    after_step: int
    id: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


class Trackers:
    """The trackers of one run. A resumed run continues the same run of the tracker: its id is kept in the
    run's folder.

    Raises:
        ConfigError: a tracker is not known, not installed, or does not start. A tracker that this run has
            used before is only reported if it does not start again.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, *, after_step: int, config: Mapping[str, Any] | None = None
    ) -> None:
        check_trackers(names)
        ids = _read_ids(folder / IDS)
        self._outlets: list[_Outlet] = []
        for name in dict.fromkeys(names):
            run = TrackedRun(folder, after_step, ids.get(name), config or {})
            try:
                tracker, run_id = _OPENERS[name](run)
            except Exception as error:  # libraries and servers of trackers raise various exceptions
                self._refuse(name, error, used_before=run.id is not None)
                continue
            if run_id is not None and run_id != run.id:
                ids[name] = run_id
                _write_ids(folder / IDS, ids)
            self._outlets.append(_Outlet(name, tracker))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Send the values of a step to every tracker. Returns at once and never raises."""
        for outlet in self._outlets:
            outlet.put(values, step)

    def close(self) -> None:
        """Wait at most a minute until every tracker has processed its values."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for outlet in self._outlets:
            outlet.end()
        for outlet in self._outlets:
            outlet.join(deadline - time.monotonic())

    def _refuse(self, name: str, error: Exception, *, used_before: bool) -> None:
        said = str(error).rstrip(".")
        text = f"trainer.trackers: {name} does not start: {type(error).__name__}: {said}"
        if not used_before:
            self.close()
            raise ConfigError(f"{text}; set it up, or leave it out") from error
        logger.error("%s. Training continues without it; metrics.jsonl has every step", text)


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed here, importing none. ConfigError names what to install."""
    for name in names:
        if name not in _OPENERS:
            raise ConfigError(f"trainer.trackers: expected some of {', '.join(_OPENERS)}, got {name!r}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trainer.trackers: {name} is not installed; "
                f"pip install 'areal-agents[{_EXTRAS[name]}]', or leave it out"
            )


class _Outlet:
    """Runs one tracker on its own thread. Its first failure is reported, later ones are counted."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._queue: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._missed = 0
        # A daemon: a tracker that hangs must not keep a finished run alive.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, values: Mapping[str, float], step: int) -> None:
        self._queue.put((step, values))

    def end(self) -> None:
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            logger.error("tracker %s missed its last metrics; metrics.jsonl has them", self._name)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            step, values = item
            self._guarded(f"at step {step}", lambda: self._tracker.log(values, step=step))  # noqa: B023
        missed = self._missed
        self._guarded("at its end", self._tracker.close)
        if missed:
            logger.warning("tracker %s has missed %d steps; metrics.jsonl has them", self._name, missed)

    def _guarded(self, when: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a failing tracker must not end the run
            self._missed += 1
            if self._missed == 1:
                logger.error(
                    "tracker %s failed %s: %s: %s. Training continues, metrics.jsonl has every step, and "
                    "further failures of this tracker are not reported",
                    self._name, when, type(error).__name__, error,
                )  # fmt: skip


class _TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps that the run repeats replace those that were logged before it was restarted.
        self._writer = SummaryWriter(str(run.folder / "tb"), purge_step=run.after_step + 1)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Weights & Biases, which reads WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and its other variables
    itself."""

    def __init__(self, run: TrackedRun, run_id: str) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            name=run.folder.name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off"),  # do not capture the process's output
        )
        # A custom step axis: the built-in step cannot go back, but a resumed run repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """trackio, which reads TRACKIO_DIR, TRACKIO_SPACE_ID and its other variables itself."""

    def __init__(self, run: TrackedRun, name: str) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name,
            resume="allow",
            config=dict(run.config),
            embed=False,
        )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


# characters that MLflow refuses; a reward may have any name
_REFUSED_BY_MLFLOW = re.compile(r"[^\w\-. :/]", re.ASCII)


class _Mlflow:
    """MLflow at MLFLOW_TRACKING_URI, or, if that is not set, in a database in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self.run_id = run.id or self._create(run)
        self._client.update_run(self.run_id, status="RUNNING")

    def _create(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        run_id: str = self._client.create_run(experiment, run_name=run.folder.name).info.run_id
        for key, value in _flat(run.config).items():
            self._client.log_param(run_id, key, str(value)[:500])
        return run_id

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_REFUSED_BY_MLFLOW.sub("_", name), float(value), now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


def _open_tensorboard(run: TrackedRun) -> tuple[Tracker, str | None]:
    return _TensorBoard(run), None


def _open_wandb(run: TrackedRun) -> tuple[Tracker, str | None]:
    run_id = run.id or secrets.token_hex(4)
    return _Wandb(run, run_id), run_id


def _open_trackio(run: TrackedRun) -> tuple[Tracker, str | None]:
    name = run.id or f"{run.folder.name}-{secrets.token_hex(4)}"  # it finds runs by name
    return _Trackio(run, name), name


def _open_mlflow(run: TrackedRun) -> tuple[Tracker, str | None]:
    tracker = _Mlflow(run)
    return tracker, tracker.run_id


_OPENERS: dict[str, Callable[[TrackedRun], tuple[Tracker, str | None]]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "mlflow": _open_mlflow,
}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        inner = value if isinstance(value, Mapping) else None
        out.update(_flat(inner, f"{prefix}{key}.") if inner is not None else {f"{prefix}{key}": value})
    return out


def _read_ids(path: Path) -> dict[str, str]:
    return json.loads(path.read_text()) if path.exists() else {}


def _write_ids(path: Path, ids: Mapping[str, str]) -> None:
    write_whole(path, json.dumps(ids))
