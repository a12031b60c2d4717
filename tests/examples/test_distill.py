"""Distillation from the model of another server, with the commands of the example, on a few tasks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_logs import ends_of_logs

from areal_agents.config import load_config
from areal_agents.process_control import end_process
from areal_agents.store import Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "distill"
MODEL = EXAMPLE.parent / "search_agent" / "model"
CONFIG = str(EXAMPLE / "config.yaml")
TASKS, COMMAND_S = 6, 200

pytestmark = pytest.mark.timeout(600)


def command(*arguments: str, run_dir: Path | None = None) -> str:
    """Run a command of `areal-agents`; return what it prints."""
    where = [f"run_dir={run_dir}"] if run_dir is not None else []
    done = subprocess.run(
        [sys.executable, "-m", "areal_agents.cli", *arguments, *where],
        capture_output=True, text=True, timeout=COMMAND_S, check=False,
    )  # fmt: skip
    logs = ends_of_logs(run_dir) if run_dir is not None else ""
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server for chat completions. That it serves the small model itself does not matter."""
    store = tmp_path_factory.mktemp("server") / "store.db"
    serve = [sys.executable, "-u", "-m", "areal_agents.cli", "serve", "--model", str(MODEL), "--port", "0"]
    process = subprocess.Popen([*serve, "--split", "eval", "--store", str(store)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        yield line.split(" at ")[1].split()[0]
        process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        end_process(process, grace_s=10)


def test_responses_of_the_server_are_selected_imitated_and_trained_further(
    server: str, tmp_path: Path
) -> None:
    demos, store = tmp_path / "demos", tmp_path / "demonstrations.db"
    collect = ["collect", CONFIG, "--endpoint", server, "--model", "strong", "--temperature", "0"]
    shown = command(*collect, "--tasks", str(TASKS), "--out", str(demos))
    attempts = [json.loads(line) for line in (demos / "attempts.jsonl").read_text().splitlines()]
    good = [attempt for attempt in attempts if attempt["result"]["score"] == 1]
    assert len(attempts) == TASKS and 0 < len(good) < TASKS, "greedy, so the same each time"
    assert f"{TASKS} episodes in {demos}, {len(good)} of them with a score of at least 1" in shown
    command("episodes", "import", str(demos), "--into", str(store), "--config", CONFIG, "--min-reward", "1")
    with Store.open(store) as opened:
        learned = opened.load_episodes([row.id for row in opened.episodes(split="train")])
    assert [episode.score for episode in learned] == [1.0] * len(good)
    assert [len(e.turns) for e in learned] == [attempt["result"]["turns"] for attempt in good]

    small = ["trainer.steps=1", "trainer.warmup_steps=0", "trainer.trackers=[]"]
    sft = tmp_path / "sft"
    command("train", str(EXAMPLE / "sft.yaml"), f"data.episodes={store}", *small, run_dir=sft)
    (row,) = [json.loads(line) for line in (sft / "metrics.jsonl").read_text().splitlines()]
    assert row["tokens"] == sum(len(turn.completion) for e in learned for turn in e.turns)
    groups = ["rollout.groups=2", "rollout.group_size=4", "rollout.concurrency=8"]
    rl = tmp_path / "rl"
    command(
        "train", CONFIG, f"model={sft / 'final'}", "eval=null", "trial=false", *small, *groups, run_dir=rl
    )
    assert (rl / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize("machine", ["24gb", "node"])
def test_the_configurations_for_gpus_are_valid_apart_from_their_models(machine: str, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        found = {}
        for stage in ("config", "sft", "on_policy", "dpo"):
            changes = [f"model={MODEL}", f"engine.python={sys.executable}"]
            if stage in ("sft", "dpo"):
                changes.append(f"data.episodes={store.path}")
            if (stage, machine) == ("on_policy", "node"):
                changes.append(f"trainer.teacher_model={MODEL}")
            found[stage] = load_config(EXAMPLE / f"{stage}.{machine}.yaml", changes)
    assert {config.profile for config in found.values()} == {machine}
    templates = {json.dumps(config.proxy.template_options) for config in found.values()}
    assert len(templates) == 1, "imported, recorded and served in one form"


def test_the_laptop_stages_start_from_the_same_model(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        recorded = [f"data.episodes={store.path}"]
        models = {
            load_config(EXAMPLE / f"{stage}.yaml", changes).model
            for stage, changes in (
                ("config", []),
                ("sft", recorded),
                ("dpo", recorded),
                ("on_policy", [f"trainer.teacher_model={MODEL}"]),
            )
        }
    assert models == {str(MODEL)}
