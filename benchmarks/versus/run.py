"""`python -m benchmarks versus`: the quick start trained by this project and by TRL, one after the other.

Both start from one model with one set of tasks, reward, batch, learning rate and clipping, each on all cores.
Their weights are evaluated afterwards, all in the same way, and that time counts for neither.
"""

from __future__ import annotations

import hashlib
import json as jsonlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from areal_agents.errors import ConfigError
from areal_agents.whole_files import write_whole

CONFIG = Path("examples/search_agent/config.yaml")
TARGET = 0.85  # held-out reward
_SAMPLED_EVERY_S = 1.0
_AREAL_CODE = ("examples/search_agent/agent.py", "examples/search_agent/config.yaml")
_TRL_CODE = ("benchmarks/versus/trl_training.py",)
UNFAIR = (
    "Unfair to TRL: its generation is made for vLLM on GPUs, and on a CPU is that of transformers, while "
    "this project has an engine for such a model. Unfair to this project: it also records every call, "
    "survives kills, runs the agent as it is over HTTP, and the start of its processes counts. The updates "
    "differ in that a batch of this project may be one version old."
)


@dataclass(frozen=True, slots=True)
class Training:
    """What one training took and reached.

    Attributes:
        name: "areal-agents" or "trl".
        steps: how many were trained.
        step_s: median time of a step in seconds, without the first.
        first_step_s: time from the start of the program to the end of its first step, in seconds.
        to_target_s: time from the start of the program to the first evaluated weights whose held-out reward
            is at least TARGET, in seconds; None: none reached it.
        held_out: the held-out reward (greedy) by step.
        tokens_per_s: sampled tokens for each second of the training.
        memory_gb: largest memory of all its processes together, in 10^9 bytes; shared pages count once.
        code_lines: lines of the user's code and configuration, without empty ones and comments.
    """

    name: str
    steps: int
    step_s: float
    first_step_s: float
    to_target_s: float | None
    held_out: dict[int, float]
    tokens_per_s: float
    memory_gb: float
    code_lines: int


def run(*, out: Path, json: bool, steps: int, every: int, seed: int, tasks: int) -> None:
    """Train with both, evaluate, and print the table.

    Args:
        out: a folder for runs and results; what it has already is not made again, so it must have been made
            with the same settings.
        every: steps between weights that are evaluated; it divides `steps`.
        tasks: held-out tasks of an evaluation.

    Raises:
        ConfigError: `every` does not divide `steps`, there is no quick start in the working directory, `out`
            was made with other settings, TRL is not installed, or a program fails.
    """
    if steps % every:
        raise ConfigError(f"--steps has to be a multiple of --every {every}, got {steps}")
    if not CONFIG.is_file():
        raise ConfigError(f"the quick start is trained, but there is no {CONFIG} here")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(CONFIG.read_bytes()).hexdigest()
    _keep_settings(
        out, {"--steps": steps, "--every": every, "--seed": seed, "--tasks": tasks, str(CONFIG): digest}
    )
    results = []
    for name, train in (("areal-agents", _train_ours), ("trl", _train_trl)):
        done = out / f"{name}.json"
        if not done.exists():
            console.print(f"training {steps} steps with {name}")
            result = train(out / name, steps, every, seed, tasks, console)
            done.write_text(jsonlib.dumps(asdict(result)) + "\n")
        kept = jsonlib.loads(done.read_text())
        results.append(Training(**{**kept, "held_out": {int(k): v for k, v in kept["held_out"].items()}}))
    _show(results)
    if json:
        print(jsonlib.dumps({"cores": os.cpu_count(), "trainings": [asdict(result) for result in results]}))


def _keep_settings(out: Path, settings: Mapping[str, int | str]) -> None:
    """Record the settings of a folder's results. Raises ConfigError if it has results of other settings."""
    file = out / "settings.json"
    elsewhere = f"give another folder with --out, or remove {out}"
    if file.exists():
        made_with = jsonlib.loads(file.read_text())
        differing = [name for name, value in settings.items() if made_with.get(name) != value]
        if differing:
            raise ConfigError(
                f"{out} has results that were made with other settings: "
                f"{', '.join(_difference(name, made_with.get(name), settings[name]) for name in differing)}; "
                f"{elsewhere}"
            )
    elif any(out.iterdir()):
        raise ConfigError(f"{out} has files, but no {file.name} that says how they were made; {elsewhere}")
    else:
        write_whole(file, jsonlib.dumps(settings) + "\n")


def _difference(name: str, before: int | str | None, now: int | str) -> str:
    return f"{name} {before}, now {now}" if name.startswith("--") else f"{name} has changed since"


def _train_ours(folder: Path, steps: int, every: int, seed: int, tasks: int, console: Console) -> Training:
    command = [
        *(sys.executable, "-m", "areal_agents", "train", str(CONFIG), "--quiet"),
        *(f"run_dir={folder / 'run'}", f"seed={seed}", f"trainer.steps={steps}", "eval=null"),
        *(f"trainer.checkpoint_every={every}", f"trainer.keep_checkpoints={steps // every + 1}"),
    ]
    begun, memory = time.time(), _run(command, folder)
    rows = _rows(folder / "run" / "metrics.jsonl")
    times = [row["time"] - begun for row in rows]
    held_out = {
        step: _held_out(f"{folder / 'run'}@{step}", folder / f"eval-{step}", tasks, console)
        for step in range(every, steps + 1, every)
    }
    tokens = sum(row["sampled_tokens"] for row in rows)
    return _training("areal-agents", times, held_out, tokens, memory, _AREAL_CODE)


def _train_trl(folder: Path, steps: int, every: int, seed: int, tasks: int, console: Console) -> Training:
    command = [
        *(sys.executable, "-m", "benchmarks.versus.trl_training", str(folder / "run")),
        *("--steps", str(steps), "--every", str(every), "--seed", str(seed)),
    ]
    memory = _run(command, folder)
    times = [row["time_s"] for row in _rows(folder / "run" / "steps.jsonl")]
    held_out = {
        step: _held_out(str(folder / "run" / f"checkpoint-{step}"), folder / f"eval-{step}", tasks, console)
        for step in range(every, steps + 1, every)
    }
    logged = _rows(folder / "run" / "log.jsonl")
    tokens = sum(128 * row["completions/mean_length"] for row in logged if "completions/mean_length" in row)
    return _training("trl", times, held_out, tokens, memory, _TRL_CODE)


def _training(
    name: str,
    times: Sequence[float],
    held_out: dict[int, float],
    tokens: float,
    memory: float,
    code: Sequence[str],
) -> Training:
    gaps = sorted(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    reached = [step for step, reward in held_out.items() if reward >= TARGET]
    return Training(
        name,
        len(times),
        gaps[len(gaps) // 2],
        times[0],
        times[reached[0] - 1] if reached else None,
        held_out,
        tokens / times[-1],
        memory,
        sum(_lines(Path(file)) for file in code),
    )


def _held_out(model: str, out: Path, tasks: int, console: Console) -> float:
    """Return the held-out reward of weights, greedy."""
    command = [sys.executable, "-m", "areal_agents", "eval", str(CONFIG), "--model", model, "--out", str(out)]
    _run([*command, f"eval.episodes={tasks}"], out.parent)
    reward = float(jsonlib.loads((out / "results.json").read_text())["metrics"]["scores"]["avg@1"]["value"])
    console.print(f"  {model}: held out {reward:.3f}")
    return reward


def _run(command: Sequence[str], folder: Path) -> float:
    """Run a program to its end; return the largest memory of its processes, in 10^9 bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.log").open("ab") as log, _watched(command, log.fileno()) as (process, peak):
        status = process.wait()
    if status:
        raise ConfigError(f"{' '.join(command)} ended with {status}; see {folder / 'output.log'}")
    return peak[0] / 1e9


@contextmanager
def _watched(command: Sequence[str], log: int) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start a program, and sample the memory of its processes until the block ends; then it is ended."""
    process = subprocess.Popen(command, stdout=log, stderr=log)
    peak, ended = [0], threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLED_EVERY_S):
            peak[0] = max(peak[0], _memory(process.pid))

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        yield process, peak
    finally:
        ended.set()
        sampling.join()
        process.terminate()
        process.wait()


def _memory(pid: int) -> int:
    """Return the memory of a process and its descendants in bytes; shared pages are divided among them."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it has ended meanwhile
    return total


def _rows(path: Path) -> list[dict[str, float]]:
    return [jsonlib.loads(line) for line in path.read_text().splitlines()]


def _lines(file: Path) -> int:
    lines = (line.strip() for line in file.read_text().splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def _show(results: Sequence[Training]) -> None:
    table = Table(title=f"the quick start, {results[0].steps} steps, {os.cpu_count()} cores")
    table.add_column("")
    for result in results:
        table.add_column(result.name, justify="right")
    rows = {
        "a step (median)": [f"{result.step_s:.1f} s" for result in results],
        "the first step, from the start": [f"{result.first_step_s:.0f} s" for result in results],
        f"to {TARGET} held out": [
            "not reached" if result.to_target_s is None else f"{result.to_target_s:.0f} s"
            for result in results
        ],
        "held out at the end": [f"{[*result.held_out.values()][-1]:.3f}" for result in results],
        "sampled tokens/s": [f"{result.tokens_per_s:,.0f}" for result in results],
        "memory": [f"{result.memory_gb:.2f} GB" for result in results],
        "lines of code and settings": [str(result.code_lines) for result in results],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console().print(table)
    print(UNFAIR)
