"""From serving to a better model, with the commands of the README: serve, call, reward, train."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from run_logs import ends_of_logs

from areal_agents.process_control import end_process

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
CITIES = ("Paris", "Oslo", "Lima", "Cairo")


@contextmanager
def serving(store: Path, *options: str) -> Iterator[tuple[str, list[str]]]:
    """Run `areal-agents serve`; yields its base URL and the lines that it prints at the start."""
    command = [sys.executable, "-u", "-m", "areal_agents.cli", "serve", "--model", str(MODEL), "--port", "0"]
    process = subprocess.Popen([*command, "--store", str(store), *options], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().decode() for _ in range(2)]
        assert lines[0].startswith("serving")
        yield lines[0].split(" at ")[1].split()[0], lines
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        end_process(process, grace_s=10)


def ask(base_url: str, city: str, *, task: str | None) -> str:
    """Call the model once, as an agent does; returns the completion's id."""
    client = openai.OpenAI(base_url=base_url, api_key="any", timeout=60, max_retries=0)
    headers = {"X-Episode-Task": task} if task else {}
    reply = client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": f"In which country is {city}?"}],
        temperature=0.0,  # pinned: training episodes are sampled from the policy
        max_tokens=12,
        extra_headers=headers,
    )
    return reply.id


def collect(base_url: str, *, grouped: bool, attempts: int = 4) -> None:
    """Make several attempts at each question, and reward them by the parity of their number."""
    plays = [(city, n) for city in CITIES for n in range(attempts)]
    with ThreadPoolExecutor(4) as pool:
        ids = [*pool.map(lambda p: ask(base_url, p[0], task=p[0] if grouped else None), plays)]
    for (_, n), completion_id in zip(plays, ids, strict=True):
        body = {"completion_id": completion_id, "reward": float(n % 2)}
        httpx.post(base_url.removesuffix("/v1") + "/rewards", json=body, timeout=60).raise_for_status()


def train(store: Path, run_dir: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    config = run_dir.parent / "config.yaml"
    config.write_text(json.dumps({"model": str(MODEL), "data": {"episodes": str(store)}}))
    command = [sys.executable, "-m", "areal_agents.cli", "train", str(config), f"run_dir={run_dir}"]
    return subprocess.run(
        [*command, "trainer.steps=2", "trainer.lr=1e-3", "rollout.groups=4", *settings],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def trained_tokens(run_dir: Path) -> list[int]:
    return [json.loads(line)["tokens"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "grouped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["grouped", "alone"]
)
def test_served_and_rewarded_calls_are_trained_on(tmp_path: Path, grouped: bool) -> None:
    store, run_dir = tmp_path / "store.db", tmp_path / "run"
    with serving(store) as (url, lines):
        assert str(store) in lines[1] and "pinned" in lines[1] and "POST /rewards" in lines[1]
        collect(url, grouped=grouped)
        listed = httpx.get(url.removesuffix("/v1") + "/episodes?split=train", timeout=60)
        shown = listed.json()["episodes"]
    assert len(shown) == len(CITIES) * 4
    tasks = {episode["task_id"] for episode in shown}
    assert len(tasks) == (len(CITIES) if grouped else len(shown))
    # Each batch is the whole store, so that its rewards differ. The episodes are still open, because no
    # client has finished them.
    done = train(store, run_dir, f"rollout.groups={len(tasks)}")
    assert done.returncode == 0, done.stdout + done.stderr + ends_of_logs(run_dir)
    assert all(tokens > 0 for tokens in trained_tokens(run_dir))
    assert (run_dir / "final" / "model.safetensors").is_file()


def test_episodes_of_split_eval_are_refused_for_training(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    with serving(store, "--split", "eval") as (url, lines):
        assert "split eval" in lines[1]
        collect(url, grouped=True, attempts=1)
    done = train(store, tmp_path / "run")
    assert done.returncode != 0
    assert "4 rewarded episodes are of split eval" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dpo", "maxrl"])
def test_single_episodes_are_refused_if_the_algorithm_must_compare_them(
    tmp_path: Path, algorithm: str
) -> None:
    store = tmp_path / "store.db"
    with serving(store) as (url, _):
        collect(url, grouped=False, attempts=2)
    done = train(store, tmp_path / "run", f"algorithm={algorithm}")
    assert done.returncode != 0
    assert "none of the 8 recorded groups has anything to train on" in done.stdout + done.stderr
    assert "X-Episode-Task" in done.stdout + done.stderr
