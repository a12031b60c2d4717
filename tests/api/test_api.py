"""Training, evaluating and serving from Python, with the quick-start model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
import yaml

import areal_agents as aa
from areal_agents.api.inputs import data_config, function_spec, write_config
from areal_agents.errors import ConfigError, DataError, RunFailed
from areal_agents.user_functions import load_function

TASKS = [
    {"id": f"t{n}", "question": f"What is the symbol of {name}?"} for n, name in enumerate(("Neon", "Tin"))
]
SMALL: dict[str, Any] = {
    "rollout": {"groups": 2, "group_size": 2, "concurrency": 4},
    "trainer": {"warmup_steps": 0, "trackers": []},
}
BONUS = 0.25


async def agent(task: dict, ep: aa.Episode) -> float:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key)
    messages: Any = [{"role": "user", "content": task["question"]}]
    reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
    return len(reply.choices[0].message.content or "") % 2 + BONUS


def test_a_run_trains_a_model_and_returns_its_episodes(tmp_path: Path) -> None:
    bonus = 0.5

    async def inner(task: dict, ep: aa.Episode) -> float:  # pickled by value, with the objects it refers to
        return await agent(task, ep) + bonus

    run = aa.train(
        inner,
        model="quickstart",
        data=TASKS,
        eval_data=TASKS,
        steps=2,
        run_dir=tmp_path / "run",
        show=False,
        **SMALL,
    )
    with run:
        run.wait(timeout_s=250)
    assert run.state == "finished" and [row["step"] for row in run.metrics] == [1, 2]
    assert run.heldout_before is not None and run.heldout_after is not None
    assert (run.model_path / "config.json").is_file()
    episodes = run.episodes(split="train", min_reward=0.75)
    assert episodes and all(episode["score"] in (0.75, 1.75) for episode in episodes)
    table = pyarrow.parquet.read_table(episodes.to_parquet(tmp_path / "good.parquet"))
    assert table.num_rows == len(episodes)
    with pytest.raises(ConfigError, match=r"areal_agents.serve\(run.model_path\)"):
        run.policy()


def test_the_error_of_a_broken_agent_is_reported(tmp_path: Path) -> None:
    def broken(task: dict, ep: aa.Episode) -> float:
        raise KeyError("no such tool")

    run = aa.train(broken, model="quickstart", data=TASKS, run_dir=tmp_path / "run", show=False, **SMALL)
    with pytest.raises(RunFailed, match="the agent fails before its first reply: KeyError: 'no such tool'"):
        run.wait(timeout_s=250)
    assert run.state == "failed"


def test_a_stopped_run_leaves_no_process(tmp_path: Path) -> None:
    run = aa.train(
        agent, model="quickstart", data=TASKS, steps=1000, run_dir=tmp_path / "run", show=False, **SMALL
    )
    try:
        with pytest.raises(TimeoutError, match="it continues"):
            run.wait(timeout_s=0.2)
        deadline = time.monotonic() + 250
        while not run.metrics and run.state == "running" and time.monotonic() < deadline:
            time.sleep(0.1)
        assert run.metrics, "no step within 250 s"
        assert _processes_of(tmp_path)
        reply = run.policy().chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Hi"}]
        )
        assert reply.choices[0].finish_reason in ("stop", "length", "tool_calls")
    finally:
        run.stop()
    run.stop()  # stopping again changes nothing
    assert run.state == "stopped" and not _processes_of(tmp_path)
    with pytest.raises(RunFailed, match="the run was stopped"):
        run.wait()


def test_the_processes_of_a_run_end_if_their_caller_is_killed(tmp_path: Path) -> None:
    code = """
        import areal_agents as aa, os, time
        def agent(task, ep): time.sleep(600)
        data = [{"q": 1}]
        run = aa.train(agent, model="quickstart", data=data, trial=False, run_dir=os.environ["FOLDER"])
        print("started", flush=True)
        run.wait()
    """
    caller = subprocess.Popen(  # it is told the folder by its environment, so it is not found by its command
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FOLDER": str(tmp_path / "run")},
    )
    try:
        assert caller.stdout is not None
        while "waiting for the proxy" not in (line := caller.stdout.readline()):
            assert line, "the run ended"
        assert _processes_of(tmp_path)
    finally:
        os.kill(caller.pid, signal.SIGKILL)
        caller.wait(30)
        caller.stdout.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + 60
    while _processes_of(tmp_path):
        assert time.monotonic() < deadline, _processes_of(tmp_path)
        time.sleep(0.1)


def _processes_of(folder: Path) -> list[str]:
    """The command lines of the processes of a run in this folder, which this process and its parents are
    not."""
    own = psutil.Process()
    others = {own.pid, *(parent.pid for parent in own.parents())}
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if str(folder) in command and process.pid not in others:
            found.append(command)
    return found


def test_an_evaluation_has_a_score_for_each_task(tmp_path: Path) -> None:
    result = aa.evaluate(
        agent, model="quickstart", data=TASKS, run_dir=tmp_path / "run", timeout_s=250, show=False
    )
    assert set(result.by_task) == {"t0", "t1"} and not (tmp_path / "run-eval").exists()
    assert result.score == pytest.approx(sum(score or 0.0 for score in result.by_task.values()) / 2)


def test_a_served_model_records_the_episodes_of_a_block(tmp_path: Path) -> None:
    from openai import OpenAI

    with aa.serve("quickstart", store=tmp_path / "store.db") as proxy:
        with proxy.episode(TASKS[0]) as ep:
            client = OpenAI(base_url=ep.base_url, api_key=ep.api_key)
            client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "Hi"}], max_tokens=2
            )
            ep.reward(1.0)
        with pytest.raises(KeyError), proxy.episode():
            raise KeyError("tool")
        proxy.openai().chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Hi"}], max_tokens=2
        )
        first, second, third = proxy.client.list_episodes()
    assert (first["status"], first["score"], first["task_id"]) == ("finished", 1.0, "t0")
    assert (second["status"], second["error"]) == ("failed", "KeyError: 'tool'")
    assert third["turns"] == 1


def test_a_model_that_cannot_be_served_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="is not a Hugging Face model folder"), aa.serve(tmp_path):
        pass


def test_functions_and_tasks_given_as_objects_reach_other_processes(tmp_path: Path) -> None:
    assert function_spec("a.py:f", tmp_path, "agent") == "a.py:f"
    assert function_spec(agent, tmp_path, "agent") == f"{Path(__file__).resolve()}:agent"
    spec = function_spec(lambda task, ep: BONUS, tmp_path, "agent")
    assert load_function(spec, ConfigError)({}, None) == 0.25
    assert data_config(iter(TASKS), tmp_path, "tasks") == {"path": str(tmp_path / "tasks.jsonl")}
    assert len((tmp_path / "tasks.jsonl").read_text().splitlines()) == 2
    with pytest.raises(DataError, match="tasks: every task must be a dict"):
        data_config([{"x": object()}], tmp_path, "tasks")
    with pytest.raises(ConfigError, match="agent is given twice"):
        write_config(tmp_path, agent="a:b", reward=None, data=None, eval_data=None, settings={"agent": "c:d"})


def test_named_files_are_resolved_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_config(
        tmp_path / "run", agent="a.py:f", reward="a.py:r", data="tasks.jsonl", eval_data=None, settings={}
    )
    assert yaml.safe_load(path.read_text()) == {
        "agent": f"{tmp_path / 'a.py'}:f",
        "reward": f"{tmp_path / 'a.py'}:r",
        "data": {"path": str(tmp_path / "tasks.jsonl")},
    }


def test_a_wrong_setting_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'trainer\.lr'"):
        aa.train(agent, model="quickstart", data=TASKS, run_dir=tmp_path / "run", lr=1e-4)


def test_a_killed_rollout_process_rewards_a_group_once(tmp_path: Path) -> None:
    """The process is killed while the group's reward function runs; its successor rewards the group."""
    called = tmp_path / "called"
    folder = tmp_path / "run"

    def rank(episodes: list) -> list[float]:
        if not called.exists():
            called.write_text("yes")
            time.sleep(600)
        return [float(place) for place, _ in enumerate(episodes)]

    async def unrewarded(task: dict, ep: aa.Episode) -> None:
        await agent(task, ep)

    small = {**SMALL, "rollout": {"groups": 1, "group_size": 3, "concurrency": 3}, "trial": False}
    run = aa.train(
        unrewarded,
        model="quickstart",
        data=TASKS,
        reward={"group": rank},
        steps=2,
        run_dir=folder,
        show=False,
        **small,
    )
    with run:
        deadline = time.monotonic() + 250
        while not called.exists():
            assert run.state == "running" and time.monotonic() < deadline, run.state
            time.sleep(0.1)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or ()
            if "rollout" in words and str(folder) in words:
                process.kill()
        run.wait(timeout_s=250)
    trained = [e for e in run.episodes(split="train", status="finished") if e["score"] is not None]
    groups = {e["group"] for e in trained}
    assert len(groups) >= 2 and run.metrics[-1]["step"] == 2
    for group in groups:
        members = [e for e in trained if e["group"] == group]
        assert sorted(e["score"] for e in members) == [0.0, 1.0, 2.0][: len(members)]
        assert all([reward["name"] for reward in e["rewards"]] == ["return"] for e in members)
