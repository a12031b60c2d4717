"""A process of a run writes its stacks on request, and no other process is ever signalled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from polling import until

from areal_agents import stacks
from areal_agents.process_control import RUN_MARK, kill_process
from areal_agents.stacks import collect_stacks, innermost, stacks_folder

PROGRAM = """
import asyncio, sys, time
from areal_agents.stacks import answer_with_stacks
answer_with_stacks("role")
async def waits_for_ever():
    print("ready", flush=True)
    await asyncio.sleep(600)
def holds_the_thread():
    print("ready", flush=True)
    time.sleep(600)
async def main():
    task = asyncio.create_task(waits_for_ever(), name="episode-7")
    await task
asyncio.run(main()) if sys.argv[1] == "async" else holds_the_thread()
"""


def start(logs: Path, kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind],
        env={**os.environ, RUN_MARK: str(logs / "role.log")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


async def test_threads_and_tasks_are_written_and_the_process_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "WAIT_S", 60.0)
    processes: list[subprocess.Popen[str]] = []

    def both_have_answered() -> bool:
        """Collect the stacks; return whether the answers are complete and contain no earlier stacks.

        On a busy machine a process may still be writing when its answer is taken for complete.
        """
        found = collect_stacks(tmp_path)
        assert set(found) == {f"role-{process.pid}" for process in processes}
        asynchronous, plain = (found[f"role-{process.pid}"] for process in processes)
        has_task = "waits_for_ever" in asynchronous.partition("Task episode-7:")[2]
        return has_task and plain.count("in holds_the_thread") == 1

    try:
        for kind in ("async", "sync"):
            processes.append(start(tmp_path, kind))
        for _ in range(2):
            await until(both_have_answered, within_s=60)
        assert [process.poll() for process in processes] == [None, None]
    finally:
        for process in processes:
            kill_process(process)
            assert process.stdout is not None
            process.stdout.close()


def test_the_file_of_a_killed_or_remote_process_is_kept_and_no_process_is_signalled(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        stacks_folder(tmp_path).mkdir()
        names = {f"trainer-{other.pid}.txt", "notes-of-somebody.txt"}
        for name in names:
            (stacks_folder(tmp_path) / name).touch()
        assert collect_stacks(tmp_path) == {}
        # The file may belong to a process on another machine, where its stacks can still be requested.
        assert other.poll() is None and {path.name for path in stacks_folder(tmp_path).iterdir()} == names
    finally:
        kill_process(other)


def test_a_process_outside_a_run_writes_nothing(tmp_path: Path) -> None:
    code = "from areal_agents.stacks import answer_with_stacks; answer_with_stacks('role')"
    environment = {name: value for name, value in os.environ.items() if name != RUN_MARK}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, timeout=60)
    assert [*tmp_path.iterdir()] == []


def test_the_innermost_frame_of_the_project_is_that_of_the_main_thread() -> None:
    found = """Thread 0x0001 (most recent call first):
  File "/x/areal_agents/store/database.py", line 1 in _write_loop

Current thread 0x0002 (most recent call first):
  File "/lib/selectors.py", line 9 in select
  File "/x/areal_agents/training/control.py", line 88 in any
  File "/x/areal_agents/training/loop.py", line 7 in run

Task main:
  File "/x/areal_agents/other.py", line 3, in waits
"""
    assert innermost(found) == "areal_agents/training/control.py, line 88 in any"
    assert innermost("the process did not answer") == ""
