"""Whole runs of `areal-agents train` on the search agent, with engine and trainer on the GPU."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_agents.errors import ArealAgentsError
from benchmarks.asynchrony.loop import measure_loop, run_config
from benchmarks.gpu.parts import Here, Skipped
from benchmarks.trainer.data import save_model

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "search_agent" / "config.yaml"
# engine against trainer on tokens of the same weights, in the two types
LARGEST_MEAN_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.02}
_SHOWN = 8000  # characters of the end of each log of a run that failed


def loop(here: Here) -> dict[str, Any]:
    """Engine, proxy, rollout and trainer through a few steps in bfloat16, with weights from a folder."""
    return _summary(_train(here, dtype="bfloat16"), "bfloat16")


def sleep(here: Here) -> dict[str, Any]:
    """A run whose engine gives its memory back while a step is trained."""
    if here.device == "cpu":
        raise Skipped("an engine on a CPU shares no memory with a trainer on a GPU")
    return _summary(_train(here, "engine.colocate=sleep", dtype="bfloat16"), "bfloat16")


def ipc(here: Here) -> dict[str, Any]:
    """A run whose engine takes new weights from the memory of the GPU that it shares with the trainer."""
    return _summary(_train(here, "trainer.publish.transport=ipc", dtype="bfloat16"), "bfloat16")


def lora(here: Here) -> dict[str, Any]:
    """A run that trains and publishes an adapter."""
    return _summary(_train(here, "trainer.lora={rank: 8}", "trainer.lr=1e-3", dtype="bfloat16"), "bfloat16")


def large(here: Here) -> dict[str, Any]:
    """A run of the step's model, whose engine shares the GPU with the trainer and takes weights by ipc.

    The weights are random and the vocabulary is that of the quick start's tokenizer; the agents, the lengths
    of their turns and their rewards are those of `python -m benchmarks async`.
    """
    tokenizer = CONFIG.parent / "model"
    vocab = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    model = save_model(
        here.scratch / "model", replace(here.scale.shape, vocab=vocab), bfloat16=True, device=here.device
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, model / name)
    changes = {
        "trainer.steps": here.scale.large_steps,
        "engine.device": here.device,
        "engine.dtype": "bfloat16",
        "engine.slots": 64,  # its keys and values take 14 GiB
        "trainer.device": here.device,
        "trainer.dtype": "bfloat16",
        "trainer.publish.transport": "ipc",
        **({"engine.colocate": "split"} if here.device == "cuda" else {}),
    }
    folder = here.scratch / "run"
    try:
        measured = measure_loop(run_config(model, folder, changes), warm_up=1)
    except ArealAgentsError as error:
        output = _end(folder.with_suffix(".log")) if folder.with_suffix(".log").exists() else ""
        raise RuntimeError(f"{error}\n{output}{_logs(folder)}") from error
    return _summary(folder, "bfloat16") | {
        "sampled_tokens_per_s": round(measured.tokens / measured.step_s),
        "trainer_idle": round(measured.trainer_idle, 3),
        "failed": measured.failed,
    }


def quick_start(here: Here) -> dict[str, Any]:
    """The quick start in float32 with its evaluations; it has to learn."""
    steps = here.scale.quick_start_steps
    overrides = [f"trainer.steps={steps}", f"eval.every={steps}"] if steps else []
    folder = _train(here, *overrides, dtype="float32", whole=True)
    found = json.loads((folder / "summary.json").read_text())
    before, after = found["heldout_before"], found["heldout_after"]
    if not steps and not after > before + 0.2:
        raise AssertionError(f"the quick start did not learn: held out {before} before and {after} after")
    return {
        "held_out_before": before,
        "held_out_after": after,
        "wall_s": round(found["wall_s"], 1),
        **_summary(folder, "float32"),
    }


def _train(here: Here, *overrides: str, dtype: str, whole: bool = False) -> Path:
    """Train the search agent, and return the run's folder."""
    scale, folder = here.scale, here.scratch / "run"
    small = [
        f"trainer.steps={scale.run_steps}", "rollout.groups=4", f"rollout.group_size={scale.episodes}",
        "trainer.warmup_steps=0", "eval=null", "trial=false",
    ]  # fmt: skip
    shared = ["engine.colocate=split"] if here.device == "cuda" else []
    command = [
        sys.executable, "-m", "areal_agents", "train", str(CONFIG), "--fresh", f"run_dir={folder}",
        f"engine.device={here.device}", f"engine.dtype={dtype}", f"trainer.device={here.device}",
        f"trainer.dtype={dtype}", "trainer.trackers=[]", *shared,
        *([f"eval.episodes={scale.evaluated}"] if whole else small), *overrides,
    ]  # fmt: skip
    if whole and scale.quick_start_steps:
        command += ["rollout.groups=4", f"rollout.group_size={scale.episodes}"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"the run ended with status {done.returncode}:\n{done.stdout[-_SHOWN:]}{_logs(folder)}"
        )
    return folder


def _logs(folder: Path) -> str:
    return "".join(f"\n--- {log.name}\n{_end(log)}" for log in sorted(folder.glob("logs/*.log")))


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-_SHOWN:]


def _summary(folder: Path, dtype: str) -> dict[str, Any]:
    """What the steps took, and that engine and trainer agree."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["tokens"]]
    if not trained:
        raise AssertionError("no token was trained")
    if not all(math.isfinite(row["grad_norm"] or math.nan) for row in trained):
        raise AssertionError(f"gradient norms are {[row['grad_norm'] for row in trained]}")
    differences = [
        row["logprob_diff_on_policy_mean"]
        for row in trained
        if row["logprob_diff_on_policy_mean"] is not None
    ]
    if differences and max(differences) > LARGEST_MEAN_DIFFERENCE[dtype]:
        raise AssertionError(
            f"engine and trainer differ by {max(differences):.1e} nats a token in {dtype}, expected at most "
            f"{LARGEST_MEAN_DIFFERENCE[dtype]:g}"
        )
    last = rows[-1]
    return {
        "steps": len(rows),
        "step_s": round(last["step_s"], 2),
        "train_s": round(last["train_s"], 2),
        "publish_s": round(last["publish_s"], 3),
        "pause_s": round(last["pause_s"], 3),
        "engine_against_trainer": float(f"{max(differences):.1e}") if differences else None,
    }
