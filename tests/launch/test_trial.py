"""An agent that cannot be trained ends the run within seconds, before any engine is started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import yaml

from areal_agents.rollout.agents.blocking import BlockingWatch

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "examples" / "search_agent" / "model"
AGENTS = """
    import asyncio, json, os, time
    from openai import AsyncOpenAI, OpenAI

    async def ask(ep, text="Hi"):
        client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0)
        reply = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": text}]
        )
        return reply.choices[0].message.content

    async def raises(task, ep):
        raise KeyError("oops")

    async def gives_no_reward(task, ep):
        await ask(ep)

    async def blocks(task, ep):
        await ask(ep)
        time.sleep(600)

    async def blocks_shortly(task, ep):
        from areal_agents.rollout.agents import blocking
        blocking._LEAST_SHARE = 0.0  # a slow machine would need more blocks
        await ask(ep)
        for _ in range(2):
            time.sleep(1.5)
            await asyncio.sleep(0.2)
        return 1.0

    async def asks_too_much(task, ep):
        await ask(ep, "word " * 20_000)
        return 1.0

    async def parses(task, ep):
        return float(json.loads(await ask(ep))["x"])

    async def ends_the_process(task, ep):
        os._exit(3)

    def calls_nobody(task, ep):
        return 1.0

    def good(task, ep):
        client = OpenAI(base_url=ep.base_url, api_key=ep.api_key)
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task["text"]}])
        return float(task["text"] == "Hi")

    def style(episode):
        return {"style": 0.5}
"""


def train(folder: Path, agent: str, *settings: str, tasks: str = '{"text": "Hi"}') -> tuple[int, str]:
    return run(folder, "train", agent, *settings, tasks=tasks)


def run(
    folder: Path, program: str, agent: str, *settings: str, tasks: str = '{"text": "Hi"}'
) -> tuple[int, str]:
    (folder / "agents.py").write_text(textwrap.dedent(AGENTS))
    (folder / "tasks.jsonl").write_text(tasks + "\n")
    (folder / "config.yaml").write_text(f"{{model: {MODEL}, agent: {agent}, data: {{path: tasks.jsonl}}}}")
    command = [sys.executable, "-m", "areal_agents.cli", program, "config.yaml", f"run_dir={folder / 'run'}"]
    done = subprocess.run(
        [*command, *settings], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("agents.py:raises", "fails before its first reply: KeyError: 'oops' ("),
        pytest.param(
            "agents.py:gives_no_reward",
            "the agent gave no reward: return a number, call ep.reward",
            marks=pytest.mark.slow,
        ),
        ("agents.py:blocks", "agents.py, line 20, in blocks: time.sleep(600)"),
        pytest.param(
            "agents.py:asks_too_much",
            "first prompt does not fit the context of the model",
            marks=pytest.mark.slow,
        ),
        (
            "agents.py:parses",
            "3 trial episodes with a scripted model failed in the same way: JSONDecodeError",
        ),
        pytest.param("agents.py:calls_nobody", "the agent made no model call", marks=pytest.mark.slow),
        ("agents.py:ends_the_process", "may have ended it, for example with os._exit"),
        ("agents.py:missing", "agents.py has no function 'missing'; it has AsyncOpenAI"),
        pytest.param(
            "'{command: no-such-program}'",
            "module:function or path/to/file.py:function",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_broken_agent_ends_the_run_with_its_reason(tmp_path: Path, agent: str, reason: str) -> None:
    code, output = train(tmp_path, agent)
    assert code == 1 and reason in output
    assert output.count("AgentError") == 1 and "Traceback" not in output
    assert not (tmp_path / "run/logs/engine.log").exists()
    assert "trial: false" in output or "no function" in output or "expected module" in output


def test_data_that_cannot_be_read_ends_the_run(tmp_path: Path) -> None:
    code, output = train(tmp_path, "agents.py:good", tasks="{")
    assert code == 1 and "tasks.jsonl" in output
    assert not (tmp_path / "run/logs/engine.log").exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["eval={data: {path: absent.jsonl}}"], "there is no data file"),
        (["eval={data: {path: tasks.jsonl}}", "ablation=agents.py:absent", "--ablate-tool"], "no function"),
    ],
)
def test_settings_that_are_needed_only_later_are_checked_first(
    tmp_path: Path, settings: list[str], reason: str
) -> None:
    code, output = train(tmp_path, "agents.py:good", *settings)
    assert code == 1 and reason in output and "absent" in output
    assert not (tmp_path / "run/logs/engine.log").exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["agent=agents.py:absent"], "agents.py has no function 'absent'"),
        (["reward=agents.py:absent"], "reward: {folder}/agents.py has no function 'absent'"),
        (["data={path: absent.jsonl}"], "there is no data file {folder}/absent.jsonl"),
        (["eval={data: {path: absent.jsonl}}"], "there is no data file {folder}/absent.jsonl"),
        (["ablation=agents.py:absent"], "agents.py has no function 'absent'"),
    ],
)
def test_a_dry_run_reports_what_cannot_be_loaded(tmp_path: Path, settings: list[str], reason: str) -> None:
    code, output = train(tmp_path, "agents.py:good", *settings, "--dry-run")
    assert code == 1 and reason.format(folder=tmp_path) in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_what_an_agent_prints_is_not_in_the_output_of_a_dry_run(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('loaded')\nasync def agent(task, ep): return 1.0\n")
    config = {"model": str(MODEL), "agent": "loud.py:agent", "data": {"path": "tasks.jsonl"}}
    (tmp_path / "tasks.jsonl").write_text('{"text": "Hi"}\n')
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "areal_agents", "train", "config.yaml", "--dry-run"],
        capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert (
        yaml.safe_load(done.stdout)["agent"] == f"{tmp_path / 'loud.py'}:agent" and done.stderr == "loaded\n"
    )


def test_an_evaluation_checks_its_agent_and_data_first(tmp_path: Path) -> None:
    code, output = run(tmp_path, "eval", "agents.py:absent", "eval={data: {path: tasks.jsonl}}")
    assert code == 1 and "agents.py has no function 'absent'" in output
    assert not (tmp_path / "run-eval/logs/engine.log").exists()


def test_a_good_agent_is_trained_after_its_trial(tmp_path: Path) -> None:
    settings = ("trainer.steps=1", "rollout.groups=2", "rollout.group_size=2", "trainer.trackers=[]")
    code, output = train(tmp_path, "agents.py:good", *settings, "reward=agents.py:style")
    assert code == 0, output
    said = "the agent gave return 1, and reward: gave style 0.5; both count: the score is 1.5"
    assert f"trial: the episode was played and rewarded; {said}" in " ".join(output.split())


def test_an_agent_that_blocks_the_event_loop_often_but_shortly_is_reported(tmp_path: Path) -> None:
    """Its trial passes, but in the run each of its episodes blocks the loop for a short time, twice."""
    settings = ("trainer.steps=1", "rollout.groups=2", "rollout.group_size=3", "trainer.trackers=[]")
    code, output = train(tmp_path, "agents.py:blocks_shortly", *settings)
    assert code == 0, output
    log = (tmp_path / "run/logs/rollout.log").read_text()
    for said in (log, output):
        assert f"{tmp_path}/agents.py, line 27, in blocks_shortly: time.sleep(1.5)" in said, said
        # Several blocks in a row, between which the loop does not run, count as one long block.
        assert "blocks its event loop again and again" in said or "has blocked its event loop for" in said
        assert "use an async client" in said
        assert "or make the agent a plain function (def)" in said


async def test_many_busy_tasks_do_not_count_as_a_block() -> None:
    reports: list[str] = []

    async def work() -> None:
        for _ in range(25):
            until = time.monotonic() + 0.02
            while time.monotonic() < until:
                pass
            await asyncio.sleep(0)

    with BlockingWatch(reports.append, blocked_s=2.0, adds_up=True):
        await asyncio.gather(*(work() for _ in range(10)))  # each iteration of the loop takes 200 ms
    assert not reports


async def test_a_blocked_event_loop_is_reported_once_for_each_block() -> None:
    """Each block lasts until it is reported, and a little longer."""
    reports: list[str] = []
    reported = threading.Event()

    def report(text: str) -> None:
        reports.append(text)
        reported.set()

    with BlockingWatch(report, blocked_s=0.6):
        await asyncio.sleep(1.0)
        assert not reports
        for number in (1, 2):
            reported.clear()
            assert reported.wait(60)
            time.sleep(0.5)  # noqa: ASYNC251 (what an agent should not do)
            assert len(reports) == number
            await asyncio.sleep(0.2)
    assert len(reports) == 2
    assert f"{Path(__file__).name}, line" in reports[0] and "reported.wait(60)" in reports[0]


async def test_short_blocks_at_one_line_are_reported_together() -> None:
    reports: list[str] = []
    with BlockingWatch(reports.append, blocked_s=1.5, adds_up=True):
        deadline = time.monotonic() + 60
        while not reports and time.monotonic() < deadline:
            time.sleep(0.5)  # noqa: ASYNC251 (what an agent should not do)
            await asyncio.sleep(0.1)
    (report,) = reports
    assert "blocks its event loop again and again" in report and "time.sleep(0.5)" in report


SILENT = """
import asyncio, sys, time
from areal_agents.rollout.agents.blocking import BlockingWatch
async def main():
    with BlockingWatch(lambda said: print(said, flush=True), blocked_s=1.0):
        await asyncio.sleep(0.5)
        print("running", flush=True)
        await asyncio.sleep(1.0)
        import slow_module
        await asyncio.sleep(0.5)
asyncio.run(main())
"""


def test_neither_other_processes_nor_imports_count_as_a_block(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(2.5)\n")
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGSTOP)  # as if other processes had the processors
    time.sleep(2.5)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0
