"""Processes are ended within a time limit, together with the processes that they left in other sessions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_agents import process_control
from areal_agents.process_control import end_leftovers, end_process, read_line

MARK = "AREAL_AGENTS_TEST_MARK"
IGNORES = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('on', flush=True); time.sleep(300)"
)


def started(code: str, mark: str = "", **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark},
        **options,  # type: ignore[call-overload]
    )


def test_a_process_ends_with_sigterm_or_else_with_sigkill() -> None:
    polite = started("print('on', flush=True); import time; time.sleep(300)")
    stubborn = started(IGNORES)
    for process, grace_s, code in ((polite, 60.0, -signal.SIGTERM), (stubborn, 0.2, -signal.SIGKILL)):
        assert process.stdout is not None
        assert read_line(process.stdout.fileno(), timeout_s=60) == "on"
        assert end_process(process, grace_s=grace_s) == code
        assert process.stdout.closed


def test_a_process_has_ended_although_another_process_holds_its_pipe() -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['setsid', 'sleep', '300']).pid, flush=True)"
    process = started(code)
    assert process.stdout is not None
    pid = int(read_line(process.stdout.fileno(), timeout_s=60))
    try:
        began = time.monotonic()
        assert end_process(process, grace_s=60) in (0, -signal.SIGTERM)
        assert time.monotonic() - began < 60
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_that_cannot_be_killed_is_left_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = started(IGNORES)
    assert process.stdout is not None
    assert read_line(process.stdout.fileno(), timeout_s=60) == "on"
    monkeypatch.setattr(process_control, "KILL_S", 0.2)
    with monkeypatch.context() as unkillable:
        unkillable.setattr(process, "kill", lambda: None)  # as in uninterruptible sleep
        assert end_process(process, grace_s=0.1) is None
    assert f"process {process.pid} has not exited within 0.2 s of SIGKILL" in caplog.text
    process.kill()
    process.wait(60)


def test_leftovers_are_found_by_their_mark_in_every_session(tmp_path: Path) -> None:
    nested = f"import subprocess, time; subprocess.Popen(['setsid', 'sleep', '300']); {IGNORES}"
    ours = [started(nested, str(tmp_path), start_new_session=True) for _ in range(2)]
    other = started(IGNORES, f"{tmp_path}/other")
    for process in (*ours, other):
        assert process.stdout is not None
        assert read_line(process.stdout.fileno(), timeout_s=60) == "on"
    assert end_leftovers(MARK, str(tmp_path)) == 4
    assert [process.wait(60) for process in ours] == [-signal.SIGKILL] * 2
    deadline = time.monotonic() + 60
    # processes that are not children of this process may still be exiting
    while end_leftovers(MARK, str(tmp_path)):
        assert time.monotonic() < deadline
    assert other.poll() is None
    for process in (*ours, other):
        end_process(process, grace_s=0)


def test_the_first_line_of_a_pipe_has_a_time_limit() -> None:
    for code, line in (
        ("print('one'); print('two')", "one"),
        ("print('no end', end='')", "no end"),
        ("", ""),
        ("import time; print('slow', end='', flush=True); time.sleep(300)", None),
    ):
        process = started(code)
        assert process.stdout is not None
        read = read_line(process.stdout.fileno(), timeout_s=60 if line is not None else 0.3)
        assert read in (("slow", "") if line is None else (line,))
        end_process(process, grace_s=0)


def test_a_process_can_forbid_its_inspection_by_other_processes() -> None:
    """The process reads the kernel's flag, since a test that runs as root may inspect every process."""
    code = "import ctypes; from areal_agents.process_control import forbid_inspection as f; "
    code += "asked = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0); print(asked()); f(); print(asked())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "0"], done.stderr


@pytest.mark.parametrize(("before", "collections"), [("", "some\n"), ("collect_seldom()", "none\n")])
def test_collect_seldom_prevents_collections_during_imports(before: str, collections: str) -> None:
    code = f"""
import gc
from areal_agents.process_control import collect_seldom
{before}
gc.collect()
counts = [generation["collections"] for generation in gc.get_stats()]
kept = [[] for _ in range(15_000)]
print("none" if counts == [generation["collections"] for generation in gc.get_stats()] else "some")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == (collections, "")


LOADED_TRITON = "import sys; sys.modules['triton'] = sys"  # whose extension reports what is left as leaks


@pytest.mark.parametrize(
    ("without", "said"),
    [("", "finalised\n"), ("collect_seldom()", ""), (f"collect_seldom(); {LOADED_TRITON}", "finalised\n")],
)
def test_collect_seldom_prevents_the_last_collection_unless_triton_is_loaded(without: str, said: str) -> None:
    code = f"""
from areal_agents.process_control import collect_seldom
{without}
class Cycle:
    def __init__(self): self.itself = self
    def __del__(self): print("finalised", flush=True)
cycle = Cycle()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == (said, "")
