"""Agent processes end when they exit, and no process that they started is left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from polling import until

from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.process_control import AGENT_MARK, INNER_AGENT_MARK, RUN_MARK
from areal_agents.rollout.agents import agent_process as processes
from areal_agents.rollout.agents import episode_logs
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.agent_process import ChildProcess
from areal_agents.rollout.agents.command import CommandAgent
from areal_agents.rollout.agents.episode_logs import EpisodeLogs
from areal_agents.rollout.agents.worker_pool import WorkerAgent
from areal_agents.secret_variables import ADMIN_KEY, ENGINE_KEY, RUN_TOKEN, TEACHER_KEY

EPISODE = Episode("e", "http://127.0.0.1:8000/e/k/v1", "k")
# A process in its own session, which holds the pipes that it inherited and ignores SIGTERM and SIGHUP.
STAYS = "setsid sh -c 'trap \"\" TERM HUP; echo $$ > pid; exec sleep 300'"
LIMIT_S = 60.0  # of each wait, far below the 300 s for which a leftover process runs
pytestmark = pytest.mark.timeout(120)


async def ended(pid: int) -> None:
    """Return when a process has ended; it stays a zombie where no process reaps orphans."""

    def is_ended() -> bool:
        try:
            return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    await until(is_ended)


async def run(command: list[str], task: dict[str, object] | None = None) -> None:
    async with asyncio.timeout(LIMIT_S):
        await CommandAgent(command).run(task or {}, EPISODE)


def pid_in(folder: Path) -> int:
    return int((folder / "pid").read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("status", [0, 3])
async def test_a_command_ends_when_it_exits_even_if_it_leaves_a_process_in_another_session(
    folder: Path, status: int
) -> None:
    code = f"{STAYS} & while ! [ -s pid ]; do sleep 0.01; done; echo said >&2; exit {status}"
    command = run(["sh", "-c", code])
    if status:
        with pytest.raises(AgentError, match="^sh exited with status 3: said$"):
            await command
    else:
        await command
    await ended(pid_in(folder))


async def test_a_leftover_process_that_is_not_found_does_not_delay_the_episode(folder: Path) -> None:
    """A process without the mark holds the pipes for 300 s, but only the grace period is waited for."""
    code = f'env -i PATH="$PATH" {STAYS} & while ! [ -s pid ]; do sleep 0.01; done; echo said >&2; exit 3'
    began = time.monotonic()
    try:
        with pytest.raises(AgentError, match="^sh exited with status 3: said$"):
            await run(["sh", "-c", code])
    finally:
        os.kill(pid_in(folder), 9)
    assert time.monotonic() - began < LIMIT_S


async def test_the_last_output_of_a_process_before_its_exit_is_kept(folder: Path) -> None:
    code = "import sys; sys.stderr.write('x' * 200_000 + 'the end'); sys.exit(2)"
    with pytest.raises(AgentError, match="xxxx" + "the end$"):
        await run([sys.executable, "-c", code])


async def test_the_output_of_a_command_is_in_the_log_of_its_episode(folder: Path) -> None:
    agent = CommandAgent(["sh", "-c", "echo seen; echo wrong >&2; exit 3"], logs=folder / "logs")
    with pytest.raises(AgentError, match="exited with status 3: wrong"):
        await agent.run({}, EPISODE)
    lines = (folder / "logs" / f"{EPISODE.id}.log").read_text().splitlines()
    assert sorted(lines) == ["seen", "wrong"]


async def test_only_the_newest_logs_and_the_beginning_of_each_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_logs, "KEPT_LOGS", 2)
    monkeypatch.setattr(processes, "LONGEST_LOG", 4)
    agent = CommandAgent(["echo", "abcdefgh"], logs=folder / "logs")
    for id in ("one", "two", "three"):
        await agent.run({}, Episode(id, EPISODE.base_url, EPISODE.api_key))
    logs = {path.name: path.read_text() for path in (folder / "logs").iterdir()}
    assert logs == {"two.log": "abcd", "three.log": "abcd"}


async def test_logs_of_running_episodes_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_logs, "KEPT_LOGS", 1)
    logs = EpisodeLogs(folder)
    for id in ("one", "two", "three"):
        logs.create(id)
    for id, left in (("two", {"one", "two", "three"}), ("one", {"one", "three"}), ("three", {"three"})):
        logs.end(id)
        assert {path.stem for path in folder.iterdir()} == left


async def test_a_task_that_the_command_does_not_read_does_not_delay_the_end(folder: Path) -> None:
    await run(["sh", "-c", f"{STAYS} <&0 & exit 0"], {"text": "x" * 1_000_000})


async def test_a_long_task_arrives_completely(folder: Path) -> None:
    task: dict[str, object] = {"text": "x" * 3_000_000}
    code = "import sys; open('task', 'w').write(sys.stdin.read())"
    await run([sys.executable, "-c", code], task)
    assert json.loads((folder / "task").read_text()) == task


@pytest.mark.parametrize("turns", range(1, 8))
async def test_a_start_that_is_cancelled_leaves_no_process(folder: Path, turns: int) -> None:
    """The time limit of an episode may expire at any moment, even between the fork and the first wait."""
    marker = f"AREAL_AGENTS_TEST_START={folder}"
    code = "sleep 300 & sleep 300"
    starting = asyncio.ensure_future(CommandAgent(["env", marker, "sh", "-c", code]).run({}, EPISODE))
    for _ in range(turns):
        await asyncio.sleep(0)
    time.sleep(0.2)  # the event loop is busy while the command starts its own children
    starting.cancel()
    await asyncio.wait({starting}, timeout=LIMIT_S)
    assert starting.cancelled()
    await until(lambda: not _with_variable(marker))


def _with_variable(variable: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def test_a_process_that_ignores_sigterm_is_killed_with_its_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TERMINATE_GRACE_S", 0.2)
    code = "trap '' TERM; sleep 300 & echo $! > child; echo $$ > pid; wait; sleep 300"
    process = await ChildProcess.start(["sh", "-c", code], environment=os.environ)
    await until(lambda: (folder / "pid").exists() and (folder / "pid").read_text().endswith("\n"))
    await process.end()
    assert await process.wait() == -9
    for name in ("pid", "child"):
        await ended(int((folder / name).read_text()))


async def test_a_program_that_does_not_exist_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        await ChildProcess.start(["no-such-program"], environment={})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            f"    subprocess.Popen({STAYS!r}, shell=True)\n    wait()\n    os._exit(7)",
            r"died \(exit status 7\)",
        ),
        # The forked process holds the worker's own pipe, so the end of its output is never reached.
        (
            "    if os.fork() == 0:\n        os.setsid()\n"
            "        open('pid', 'w').write(f'{os.getpid()}\\n')\n"
            "        time.sleep(300)\n    wait()\n    os._exit(7)",
            r"died \(exit status 7\)",
        ),
        ("    os.closerange(3, 100)\n    time.sleep(300)", "closed the pipe of its worker process"),
    ],
    ids=["other session", "fork", "closed"],
)
async def test_a_worker_whose_pipes_are_held_or_closed_fails_its_episode(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setattr("areal_agents.rollout.agents.worker_pool.EXIT_S", 0.2)
    (folder / "held_agent.py").write_text(
        "import os, subprocess, time\n"
        "def wait():\n"
        "    while not (os.path.exists('pid') and open('pid').read()): time.sleep(0.01)\n"
        f"def agent(task, ep):\n{body}\n"
    )
    agent = WorkerAgent(f"{folder}/held_agent.py:agent", size=1)
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(AgentError, match=message):
                await agent.run({}, EPISODE)
    finally:
        await agent.close()
    if (folder / "pid").exists():
        await ended(pid_in(folder))


async def test_a_reward_that_a_worker_reported_before_it_was_ended_counts(folder: Path) -> None:
    (folder / "late_agent.py").write_text(
        "import pathlib, time\n"
        "def agent(task, ep):\n"
        "    pathlib.Path('started').touch()\n"
        "    while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        "    ep.reward(0.25, name='so far')\n"
        "    pathlib.Path('reported').touch()\n"
        "    time.sleep(300)\n"
    )
    reports: list[tuple[str, dict[str, Any]]] = []
    episode = Episode(
        EPISODE.id, EPISODE.base_url, EPISODE.api_key, lambda path, body: reports.append((path, body))
    )
    agent = WorkerAgent(f"{folder}/late_agent.py:agent", size=1)
    running = asyncio.create_task(agent.run({}, episode))
    await until((folder / "started").exists)
    (folder / "go").touch()
    while not (folder / "reported").exists():  # meanwhile this process reads nothing
        time.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
    await agent.close()
    assert running.cancelled() and [body["reward"] for _, body in reports] == [0.25]


async def test_ending_twice_is_harmless(folder: Path) -> None:
    process = await ChildProcess.start(["sleep", "300"], environment=os.environ, tail=True)
    endings: list[Awaitable[None]] = [process.end(), process.end()]
    await asyncio.gather(*endings)
    await process.end()
    assert await process.wait() == -15


async def test_a_process_gets_the_marks_of_this_one_even_with_an_empty_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the marks it is found if this process is killed and so cannot end it."""
    monkeypatch.setenv(RUN_MARK, "the log")
    monkeypatch.setenv(AGENT_MARK, "the worker")
    process = await ChildProcess.start(["/usr/bin/env"], environment={}, tail=True)
    await asyncio.wait_for(process.wait(), LIMIT_S)
    await process.end()
    marks = dict(line.split("=", 1) for line in process.printed().splitlines())
    assert marks.pop(INNER_AGENT_MARK)
    assert marks == {RUN_MARK: "the log", AGENT_MARK: "the worker"}


@pytest.mark.parametrize("passed", [[], ["PGPASSWORD"]])
async def test_a_command_gets_the_password_of_the_store_only_if_its_configuration_says_so(
    passed: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGPASSWORD", RUN_TOKEN, ADMIN_KEY, ENGINE_KEY, "OF_THE_USER"):
        monkeypatch.setenv(name, f"value of {name}")
    command = f"sh -c 'env > {folder / 'variables'}'"
    agent = load_agent({"command": command, "pass_environment": passed})
    async with asyncio.timeout(LIMIT_S):
        await agent.run({}, EPISODE)
    variables = (folder / "variables").read_text()
    found = [
        name for name in ("PGPASSWORD", RUN_TOKEN, ADMIN_KEY, ENGINE_KEY) if f"value of {name}" in variables
    ]
    assert found == passed and "OF_THE_USER=value of OF_THE_USER" in variables


async def test_an_agent_does_not_get_the_secrets_of_the_run() -> None:
    given = {ENGINE_KEY: "secret", TEACHER_KEY: "secret", ADMIN_KEY: "secret", "OF_THE_USER": "1"}
    process = await ChildProcess.start(["/usr/bin/env"], environment=given, tail=True)
    await asyncio.wait_for(process.wait(), LIMIT_S)
    await process.end()
    assert "secret" not in process.printed() and "OF_THE_USER=1" in process.printed()
