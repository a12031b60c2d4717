"""The command line from a new user's perspective: serve a model, point an agent at it, make mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.ready import wait_until_ready

EXAMPLE = Path(__file__).parent.parent / "examples" / "search_agent"
QUESTION = "What is the currency of the country where Lyon is?"
TIMEOUT_S = 120


def areal(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_agents.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=cwd)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = tmp_path_factory.mktemp("serve") / "store.db"
    command = [sys.executable, "-m", "areal_agents.cli", "serve", "--model", str(EXAMPLE / "model")]
    with reserved_ports(1) as (port,):
        process = subprocess.Popen([*command, "--port", str(port), "--store", str(store)])
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/ready", timeout_s=TIMEOUT_S)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=TIMEOUT_S) == 0


def test_the_example_agent_shows_its_turns_and_is_recorded(proxy: str) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": f"{proxy}/v1", "OPENAI_API_KEY": "anything"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "agent.py"), QUESTION],
        capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=True,
    )  # fmt: skip
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert [m["role"] for m in messages[:3]] == ["system", "user", "assistant"]
    assert messages[1]["content"] == QUESTION

    (episode,) = httpx.get(f"{proxy}/episodes", timeout=60).json()["episodes"]
    recorded = httpx.get(f"{proxy}/episodes/{episode['id']}?tokens=1", timeout=60).json()["turns"]
    assert len(recorded) == sum(m["role"] == "assistant" for m in messages)
    for earlier, later in zip(recorded, recorded[1:], strict=False):
        assert later["parent"] == earlier["id"]
        exact = earlier["prompt_ids"] + earlier["token_ids"]
        assert later["prompt_ids"][: len(exact)] == exact
    for turn in recorded:
        assert len(turn["token_ids"]) == len(turn["logprobs"]) == len(turn["versions"])


def test_a_reward_by_completion_id_finds_the_implicit_episode(proxy: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Lyon?"}], "max_tokens": 4}
    reply = httpx.post(f"{proxy}/v1/chat/completions", json=body, timeout=60).json()
    given = {"completion_id": reply["id"], "reward": 0.5}
    rewarded = httpx.post(f"{proxy}/rewards", json=given, timeout=60)
    assert rewarded.status_code == 200
    episodes = httpx.get(f"{proxy}/episodes", timeout=60).json()["episodes"]
    assert [e["score"] for e in episodes if e["score"] is not None] == [0.5]


def test_a_taken_port_is_named(proxy: str) -> None:
    port = proxy.rpartition(":")[2]
    done = areal("serve", "--model", str(EXAMPLE / "model"), "--port", port)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--model", "nowhere"], "nowhere"),
        (["serve", "--model", str(EXAMPLE / "model"), "--host", "0.0.0.0"], "--admin-key"),
        (["serve", "--model", str(EXAMPLE / "model"), "--engine-url", "gpu1:30000"], "http://host:port"),
        (["serve", "--model", str(EXAMPLE / "model"), "--router-url", "http://r:1"], "--engine-url"),
        (
            ["serve", "--model", str(EXAMPLE / "model"), "--router-url", "http://r:1", "--workers", "2"],
            "--engine-url",
        ),
        (["engine", "--model", "nowhere"], "/nowhere is not a folder"),
        (["engine", "--model", str(EXAMPLE / "model"), "--dtype", "int3"], "--dtype"),
        (["train", "nowhere.yaml"], "there is no config file nowhere.yaml"),
        (["train", str(EXAMPLE / "config.yaml"), "trainer.stpes=3"], "did you mean 'trainer.steps'?"),
        (["eval", str(EXAMPLE / "config.yaml"), "eval=null"], "no eval.data"),
        (["export", "nowhere", "out"], "nowhere is neither a checkpoint"),
    ],
)
def test_mistakes_get_one_clear_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = areal(*arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_agent_that_does_not_import_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import no_such_module\n")
    arguments = [f"agent={tmp_path / 'agent.py'}:agent", f"run_dir={tmp_path / 'run'}", "eval=null"]
    done = areal("train", str(EXAMPLE / "config.yaml"), *arguments)
    assert done.returncode == 1
    assert "AgentError: cannot import" in done.stderr and "no_such_module" in done.stderr


def test_an_empty_data_set_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("")
    arguments = [f"data.path={tmp_path / 'tasks.jsonl'}", f"run_dir={tmp_path / 'run'}", "eval=null"]
    done = areal("train", str(EXAMPLE / "config.yaml"), *arguments)
    assert done.returncode == 1
    assert "is empty" in done.stderr
