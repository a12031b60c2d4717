"""`train` and `evaluate`: a run in processes of its own, and the handle on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from areal_agents.api.inputs import AgentLike, DataLike, write_config
from areal_agents.api.notebook import NotebookView, in_notebook
from areal_agents.client import Client
from areal_agents.config import load_config
from areal_agents.direct_http import openai_client_sync
from areal_agents.errors import ArealAgentsError, ConfigError, RequestError, RunFailed
from areal_agents.evaluation.policies import policy_of_run
from areal_agents.evaluation.results import Results
from areal_agents.inspection.export import row_of, write_jsonl, write_parquet
from areal_agents.inspection.sources import matching, opened, read_json, store_of_run
from areal_agents.launch.progress import MetricsFile, read_held_out
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.stopping import stop_timeout_s
from areal_agents.launch.supervision import GRACE_S, SUPERVISED

if TYPE_CHECKING:
    from areal_agents.direct_http import OpenAI

STOP_S = 60.0  # longest wait for a run that was told to end, besides its trainer; then it is killed
KEPT_LINES = 40  # of a run's output, for the message of RunFailed
_COLOR_FORCED = ("FORCE_COLOR", "CLICOLOR_FORCE")  # Jupyter sets them; the output of a run is read as lines


def train(
    agent: AgentLike,
    *,
    model: str | Path,
    data: DataLike,
    eval_data: DataLike | None = None,
    reward: Callable[..., Any] | str | Mapping[str, Any] | None = None,
    algorithm: str | Mapping[str, Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    name: str = "python",
    run_dir: str | Path | None = None,
    fresh: bool = False,
    show: bool = True,
    **settings: Any,
) -> Run:
    """Start training an agent, and return at once. `areal-agents train` is the same program.

    Args:
        agent: a function of (task, ep), "file.py:function", or {"command": "…"}. A function of a notebook is
            sent to the processes of the run by value.
        model: a Hugging Face folder, an id of the Hub, or "quickstart".
        data: tasks: a list of dicts, a data set of `datasets`, a file, an id of the Hub, or a function.
        eval_data: held-out tasks in one of these forms; None: no evaluation.
        reward: a reward function apart from the agent, its name, or {"group": function}; docs/rewards.md.
        algorithm: a preset such as "dapo", or a mapping of settings.
        steps: the number of training steps (trainer.steps).
        seed: the seed of the run.
        name: the name of the run.
        run_dir: the folder of the run; default: runs/<name>-seed<seed>. An earlier run in it is resumed.
        fresh: set an earlier run aside instead.
        show: print the progress of the run.
        settings: further configuration keys: sections as mappings (rollout={"groups": 4}).

    Raises:
        ConfigError, AgentError, DataError: what is given cannot be used. What is only found in the processes
            of the run, `Run.wait` raises as RunFailed.
    """
    folder = Path(run_dir) if run_dir is not None else Path("runs") / f"{name}-seed{seed}"
    given = {**settings, "name": name, "seed": seed, "model": _model(model), "run_dir": str(folder.resolve())}
    if algorithm is not None:
        given["algorithm"] = algorithm
    if steps is not None:
        given["trainer"] = {**settings.get("trainer", {}), "steps": steps}
    inputs = folder.resolve().with_name(folder.name + "-inputs")
    path = write_config(inputs, agent=agent, reward=reward, data=data, eval_data=eval_data, settings=given)
    config = load_config(path)
    view = NotebookView(RunFolder(folder.resolve()), config) if show and in_notebook() else None
    process = _Process("train", path, *(["--fresh"] if fresh else []), show=show, view=view)
    return Run(folder.resolve(), process)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        score: the mean score of all episodes; a failed one counts as 0.
        by_task: the mean score of each task, by its id; None if all its episodes failed.
        results: each attempt; `results.metrics()` has avg@k, pass@k, pass^k and maj@k with their intervals.
    """

    score: float
    by_task: Mapping[str, float | None]
    results: Results


def evaluate(
    agent: AgentLike,
    *,
    model: str | Path,
    data: DataLike,
    reward: Callable[..., Any] | str | Mapping[str, Any] | None = None,
    episodes: int | None = None,
    attempts: int = 1,
    temperature: float = 0.0,
    by: Sequence[str] = (),
    out: str | Path | None = None,
    name: str = "python",
    run_dir: str | Path | None = None,
    timeout_s: float | None = None,
    show: bool = True,
    **settings: Any,
) -> Evaluation:
    """Evaluate a model on tasks. `areal-agents eval` is the same program.

    Args:
        agent, data, reward, name, run_dir, show, settings: see `train`.
        model: see `train`; also RUN@final, RUN@best or RUN@STEP.
        episodes: the number of tasks; default: 128, or as many as the data has.
        attempts: the number of attempts at each task; more than one needs a `temperature` above 0.
        temperature: the temperature of sampling; 0 is greedy.
        by: fields of the tasks by whose values the results are divided.
        out: a folder that keeps the results and the episodes; an evaluation that was stopped continues in it.
        timeout_s: time limit in seconds; None: no limit.

    Raises:
        RunFailed: the evaluation failed.
        TimeoutError: it did not end in time; its processes have been ended.
    """
    folder = (Path(run_dir) if run_dir is not None else Path("runs") / name).resolve()
    of_run = policy_of_run(str(model))
    weights = str(of_run.folder) if of_run is not None else _model(model)
    given = {**settings, "name": name, "model": weights, "run_dir": str(folder)}
    count = {} if episodes is None else {"episodes": episodes}
    given["eval"] = {**settings.get("eval", {}), **count, "attempts": attempts, "temperature": temperature}
    inputs = folder.with_name(folder.name + "-inputs")
    path = write_config(inputs, agent=agent, reward=reward, data=data, eval_data=data, settings=given)
    load_config(path)
    kept = str(Path(out).resolve()) if out is not None else None
    options = json.dumps({"model": str(model), "out": kept, "by": list(by)})
    process = _Process("evaluate", path, options, show=show)
    try:
        process.wait(timeout_s)
    finally:
        process.stop()
    results = Results.read(inputs / "results.json")
    by_task = {
        task.id: None if all(a.status == "failed" for a in task.attempts) else fmean(task.scores)
        for task in results.tasks
    }
    return Evaluation(fmean(score for task in results.tasks for score in task.scores), by_task, results)


class Run:
    """A run in processes of its own, which end with this process. Also a context manager, which stops it.

    Attributes:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path, process: _Process) -> None:
        self.folder = folder
        self._files = RunFolder(folder)
        self._process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Run {self.folder.name}: {self.state}, step {len(self.metrics)}>"

    @property
    def state(self) -> str:
        """ "running", "finished", "failed" or "stopped"."""
        return self._process.state

    def wait(self, timeout_s: float | None = None) -> Run:
        """Return when the run has ended; Ctrl-C stops the run.

        Raises:
            RunFailed: the run has failed, or was stopped; the message has the cause.
            TimeoutError: it is still running after `timeout_s` seconds, and continues.
        """
        try:
            self._process.wait(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the run and its processes; the same call of `train` resumes it from its last checkpoint."""
        self._process.stop()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict for each training step so far; docs/metrics.md."""
        file = MetricsFile(self._files.metrics)
        file.update()
        return file.rows

    @property
    def summary(self) -> dict[str, Any] | None:
        """The results of the run; None before its end."""
        return read_json(self._files.summary)

    @property
    def heldout_before(self) -> float | None:
        """The held-out score before training; None if it is not known."""
        return self._held_out("before")

    @property
    def heldout_after(self) -> float | None:
        """The held-out score after training; None if it is not known."""
        return self._held_out("after")

    @property
    def model_path(self) -> Path:
        """The folder of the trained model. Raises ConfigError before the end of the run."""
        if not self._files.final_model.exists():
            raise ConfigError(f"the run is {self.state}, and has no trained model yet; wait() for its end")
        return self._files.final_model

    def episodes(
        self,
        *,
        split: str | None = None,
        status: str | None = None,
        task: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
    ) -> Episodes:
        """Return the episodes so far that match every given condition."""
        with opened(str(self.folder)) as source:
            found = source.list(split=split, status=status, group=None)
            found = matching(found, task=task, min_reward=min_reward, max_reward=max_reward)
            return Episodes([row_of(summary, source.get(summary["id"])) for summary in found])

    def policy(self) -> OpenAI:
        """Return an OpenAI client whose calls the newest version answers (with any name of a model).

        Its calls are recorded as evaluation episodes and never trained on. Raises ConfigError after the end
        of the run, when no proxy runs.
        """
        try:
            endpoints = self._files.read_endpoints()
            with Client(endpoints.proxy_url, endpoints.admin_key) as client:
                client.served_version()
                opened_episode = client.open_episode(split="eval")
        except (FileNotFoundError, RequestError) as error:
            raise ConfigError(
                f"the run is {self.state}, and its proxy does not answer; for its trained model: "
                "areal_agents.serve(run.model_path)"
            ) from error
        return openai_client_sync(base_url=opened_episode.base_url, api_key=opened_episode.api_key)

    def _held_out(self, label: str) -> float | None:
        summary = self.summary
        if summary is not None:
            return summary[f"heldout_{label}"]
        try:
            with store_of_run(self._files) as store:
                return next((e.reward for e in read_held_out(store) if e.label == label), None)
        except ConfigError:  # there is no store yet
            return None


class Episodes(list[dict[str, Any]]):
    """Episodes as dicts, with the columns that docs/inspecting.md lists."""

    def to_parquet(self, path: str | Path) -> Path:
        """Write the episodes as Parquet; the file appears when it is whole."""
        write_parquet(self, Path(path))
        return Path(path)

    def to_jsonl(self, path: str | Path) -> Path:
        """Write the episodes as JSON lines; the file appears when it is whole."""
        write_jsonl(self, Path(path))
        return Path(path)


class _Process:
    """The supervisor of a run as a child process, and a thread that reads its output."""

    def __init__(
        self, program: str, config: Path, *options: str, show: bool, view: NotebookView | None = None
    ) -> None:
        self._config = config
        self._error = config.parent / "error.txt"
        self._error.unlink(missing_ok=True)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._show = show
        self._view = view
        self._was_stopped = False
        self._child = subprocess.Popen(
            [sys.executable, "-u", "-m", "areal_agents.api.process", program, str(config), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **{name: value for name, value in os.environ.items() if name not in _COLOR_FORCED},
                SUPERVISED: f"{GRACE_S:g}",
            },
            start_new_session=True,  # Ctrl-C of the terminal goes to the caller, who ends the run
        )
        self._reader = threading.Thread(target=self._read, name="run output", daemon=True)
        self._reader.start()
        # Without a reference to it the run ends; the end of this process closes the pipe.
        self._finalizer = weakref.finalize(self, _close, self._child)

    @property
    def state(self) -> str:
        code = self._child.poll()
        if code is None:
            return "running"
        return "finished" if code == 0 else "stopped" if code == 130 or self._was_stopped else "failed"

    def wait(self, timeout_s: float | None) -> None:
        try:
            code = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run has not ended within {timeout_s:g} s; it continues") from None
        self._reader.join(STOP_S)
        if code == 0:
            return
        if self.state == "stopped":
            raise RunFailed("the run was stopped; the same call of train resumes it")
        cause = self._error.read_text() if self._error.exists() else "\n".join(self._lines)
        raise RunFailed(cause or f"the run ended with exit code {code}")

    def stop(self) -> None:
        if self._child.poll() is None:
            self._was_stopped = True
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(STOP_S + stop_timeout_s(load_config(self._config)))
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait(STOP_S)
        self._reader.join(STOP_S)

    def _read(self) -> None:
        assert self._child.stdout is not None
        if self._view is not None:
            self._view.start()
        for line in self._child.stdout:
            self._lines.append(line.rstrip("\n"))
            if self._view is not None:
                self._view.line(line.rstrip("\n"))
            elif self._show:
                print(line, end="", flush=True)
        if self._view is not None:
            self._view.end()


def _close(child: subprocess.Popen[str]) -> None:
    """Close the pipe that keeps a run alive."""
    assert child.stdin is not None
    child.stdin.close()


def _model(given: str | Path) -> str:
    path = Path(given)
    return str(path.resolve()) if path.exists() else str(given)


__all__ = ["ArealAgentsError", "Episodes", "Evaluation", "Run", "evaluate", "train"]
