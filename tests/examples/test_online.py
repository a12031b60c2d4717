"""Serving, rating, training, promoting and rolling back behind one URL, with the example's own scripts."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import judge
import pytest
from questions import train_tasks
from users import Population

from areal_agents.config import load_config
from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 180
SMALL = [
    "rollout.groups=4",
    "rollout.canary.steps=1",
    "rollout.canary.scores=[-1e6, 1e6]",  # a wide range gives no verdict: the operator decides
    "rollout.canary.most_conversations=1000000",
    "trainer.steps=2",
    "engine.slots=4",
    "proxy.implicit_idle_s=0.5",
]


@contextmanager
def users_of(url: str) -> Iterator[Population]:
    """Users who converse throughout the with-block; some thumbs arrive late, and some never."""
    population = Population(url, "users-of-the-example", 0.3, 0.4, 0.2, random.Random(0))

    async def converse() -> None:
        running = asyncio.create_task(population.run(train_tasks(0, 256), 10**9, 4))
        while not stop.is_set():
            await asyncio.sleep(0.05)
            if running.done():
                await running
        running.cancel()
        await asyncio.wait([running])

    stop, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            asyncio.run(converse())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield population
    finally:
        stop.set()
        thread.join(60)
    assert not failures and not thread.is_alive(), failures


def online(order: str, run_dir: Path) -> None:
    subprocess.run([sys.executable, "-m", "areal_agents", "online", order, str(run_dir)], check=True)


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_ports(1) as (port,):
        yield port


def test_a_served_model_learns_and_the_operator_decides(tmp_path: Path, port: int) -> None:
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "areal_agents", "train", str(EXAMPLES / "online" / "config.yaml")]
    with (tmp_path / "train.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *SMALL, f"run_dir={folder.root}", f"proxy.port={port}"], stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert process.poll() is None, (tmp_path / "train.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def serves() -> bool:
        try:
            return httpx.get(f"{url}/ready", trust_env=False).json().get("serving") == 2
        except httpx.TransportError:
            return False

    try:
        wait_for(serves)
        with Store.open(folder.store) as store:

            def states() -> list[str | None]:
                return [row.canary for row in store.published_versions()]

            with users_of(url):
                wait_for(lambda: states() == [None, "candidate"])
                wait_for(lambda: judge.judge_once(folder.root, grace_s=0) > 0)
                online("promote", folder.root)
                wait_for(lambda: states() == [None, "promoted", "candidate"])
                online("rollback", folder.root)
                wait_for(lambda: states() == [None, "promoted", "rolled_back", None])
            assert process.wait(TIMEOUT_S) == 0, (tmp_path / "train.log").read_text()
            for name in ("thumb", "judge"):
                assert store.episodes_with_reward(name)
            assert store.group_counts()["trained"] == 8
            served = {episode.version_max for episode in store.episodes() if episode.version_max is not None}
            assert {0, 1} <= served
            assert all(episode.metadata["user"].startswith("user-") for episode in store.episodes())
    finally:
        process.terminate()
        process.wait(60)
    assert folder.final_model.is_dir()


@pytest.mark.parametrize("name", ["config.yaml", "config.24gb.yaml", "config.node.yaml"])
def test_the_configurations_are_valid(name: str, model_folder: Path) -> None:
    config = load_config(EXAMPLES / "online" / name, [f"model={model_folder}"])
    assert config.data.traffic and config.rollout.canary is not None


def test_the_judge_grades_the_last_reply() -> None:
    (task,) = train_tasks(0, 1)
    asked = {"new_messages": [{"role": "user", "content": task["question"]}]}
    searched = {**asked, "reply": {"role": "assistant", "content": "", "tool_calls": [{}]}}
    answered = {"new_messages": [], "reply": {"role": "assistant", "content": task["answer"]}}
    assert judge.grade([searched, answered]) == 1.0
    assert judge.grade([searched]) == 0.0
    unknown = json.loads(json.dumps(searched).replace(task["question"], "Who are you?"))
    assert judge.grade([unknown]) is None
    in_parts = {**asked, "new_messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}
    for question in (in_parts, {**asked, "new_messages": [{"role": "system", "content": "Be brief."}]}):
        assert judge.grade([{**question, "reply": answered["reply"]}]) is None
    silent = {"new_messages": [], "reply": {"role": "assistant"}}
    assert judge.grade([searched, silent]) == 0.0


def test_a_deleted_or_leased_conversation_does_not_stop_the_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator may delete a conversation while it is judged, and the trainer may lease it."""
    (task,) = train_tasks(0, 1)
    turn = {
        "new_messages": [{"role": "user", "content": task["question"]}],
        "reply": {"role": "assistant", "content": task["answer"]},
    }
    listed = [{"id": name, "score": None, "ended_at": 0.0} for name in ("deleted", "leased", "kept")]
    rated: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/episodes":
            return httpx.Response(200, json={"episodes": listed, "next": None})
        if "deleted" in path:
            return httpx.Response(404)
        if request.method == "GET":
            return httpx.Response(200, json={"turns": [turn]})
        rated.append(path)
        return httpx.Response(409 if "leased" in path else 200, json={})

    client = httpx.Client

    def scripted(**options: Any) -> httpx.Client:
        return client(**options, transport=httpx.MockTransport(answer))

    monkeypatch.setattr(judge.httpx, "Client", scripted)
    (tmp_path / "endpoints.json").write_text(json.dumps({"proxy_port": 1, "admin_key": "k"}))
    assert judge.judge_once(tmp_path, grace_s=0) == 1
    assert rated == ["/episodes/leased/reward", "/episodes/kept/reward"]
