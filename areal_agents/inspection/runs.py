"""The state of runs, read from their folders."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_agents.errors import ConfigError
from areal_agents.inspection.sources import config_of_run, read_json, rerun_in
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.report.describe import describe_step
from areal_agents.launch.run_folder import RunFolder

PERIOD_S = 0.5


def list_runs(root: Path) -> list[dict[str, Any]]:
    """Return the state of every run in a folder, the newest first; `problem` says why one has no metrics.

    Folders of evaluations are not among them.

    Raises:
        ConfigError: there is no such folder.
    """
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}; give the folder that has the runs")
    found = []
    for path in root.glob("*/lock"):
        folder = RunFolder(path.parent)
        if folder.evaluation.exists():
            continue
        try:
            config = config_of_run(folder)
        except ConfigError:  # another program's folder
            continue
        metrics, problem = MetricsFile(folder.metrics), None
        try:
            metrics.update()
        except ConfigError as error:
            problem = str(error)
        try:
            state = state_of(folder, config, metrics.rows)
        except ConfigError as error:  # one broken file does not hide the other runs
            state, problem = _unreadable(folder, config), str(error)
        found.append({**state, "problem": problem})
    return sorted(found, key=lambda run: -run["started"])


def chosen_run() -> Path:
    """Return the run that is meant if none is named: the current folder, or the newest in runs/.

    Raises:
        ConfigError: there is none.
    """
    if Path("config.yaml").is_file() and Path("lock").is_file():
        return Path()
    found = list_runs(Path("runs")) if Path("runs").is_dir() else []
    if not found:
        raise ConfigError("there is no run here; give the folder of the run")
    return Path("runs") / found[0]["name"]


def state_of(
    folder: RunFolder, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state of a run from its configuration and the rows of its metrics."""
    summary = read_json(folder.summary) or {}
    running = is_running(folder)
    return {
        "name": folder.root.name,
        "started": folder.config.stat().st_mtime,
        "state": "running" if running else "finished" if summary else "stopped",
        "step": rows[-1]["step"] if rows else 0,
        "steps": _last_step(folder, config),
        "before": summary.get("heldout_before"),
        "after": summary.get("heldout_after"),
        "agent_changed": summary.get("agent_changed", ""),
        "model": str(folder.final_model) if folder.final_model.exists() else config.get("model"),
    }


def _unreadable(folder: RunFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a run whose files cannot be read."""
    return {
        "name": folder.root.name,
        "started": folder.config.stat().st_mtime,
        "state": "unreadable",
        "step": 0,
        "steps": config["trainer"]["steps"],
        "before": None,
        "after": None,
        "agent_changed": "",
        "model": config.get("model"),
    }


def _last_step(folder: RunFolder, config: Mapping[str, Any]) -> int:
    """Return the step with which a run ends."""
    rerun = rerun_in(folder)
    last: int = config["trainer"]["steps"] if rerun is None else rerun["until"]
    return last


def is_running(folder: RunFolder) -> bool:
    """Whether a supervisor holds the lock of a run's folder."""
    try:
        with open(folder.root / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def follow(root: Path, *, lines: int, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield a line for each of the last steps of a run, and for each further one, until the run has ended.

    Errors and warnings of the rollout process and the trainer are among the lines.

    Raises:
        ConfigError: the folder is not that of a run.
    """
    folder = RunFolder(root)
    steps = _last_step(folder, config_of_run(folder))
    metrics = MetricsFile(folder.metrics)
    logs = [_Log(folder.log(name)) for name in ("rollout", "trainer")]
    shown: int | None = None
    while True:
        running = is_running(folder)  # read first, so that what a run writes at its end is shown
        metrics.update()
        new = [row for row in metrics.rows if shown is None or row["step"] > shown]
        for row in new[-lines:] if shown is None else new:
            yield describe_step(row, steps)
        shown = metrics.rows[-1]["step"] if metrics.rows else (shown or 0)
        for log in logs:
            yield from log.new_problems()
        if not running:
            yield "the run has ended" if folder.summary.exists() else "the run is not running"
            return
        sleep(PERIOD_S)


class _Log:
    """The warnings and errors that are appended to a log after this object was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new_problems(self) -> Iterator[str]:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if " WARNING " in line or " ERROR " in line:
                yield line
