"""Which processes of a run are restarted when they die, which end the run, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_agents.launch import children as launch_children
from areal_agents.launch.children import MOST_RESTARTS, ChildDied, Children
from areal_agents.launch.signals import Interrupted, interruptible

# A process that starts another one in its own session, as agents do, and writes both process ids.
MODULE = """
import os, subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {left.pid}\\n")
time.sleep(600) if len(sys.argv) < 3 else sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "chaos_module_of_the_tests.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(launch_children, "FIRST_PAUSE_S", 0.0)
    with Run(tmp_path) as started:
        yield started


class Run(Children):
    """Children that only sleep; `said` has the messages to the user."""

    module = "chaos_module_of_the_tests"

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.folder = folder
        super().__init__(stop_timeout_s=5, say=self.said.append, events=folder / "processes.jsonl")

    def begin(self, name: str, *arguments: str, restarts: bool) -> None:
        log = self.folder / f"{name}.log"
        self.start(name, [str(self.pids_of(name)), *arguments], log=log, environment={}, restarts=restarts)

    def pids_of(self, name: str) -> Path:
        return self.folder / f"{name}.pids"

    def lives(self, name: str, count: int = 1) -> list[list[int]]:
        """Return the pid of a child and of its own child for each start, once there were `count` starts."""
        path = self.pids_of(name)
        wait_for(lambda: path.exists() and path.read_text().count("\n") >= count, self.check)
        return [[int(pid) for pid in line.split()] for line in path.read_text().splitlines()]


def wait_for(condition: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        meanwhile()
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_killed_server_is_restarted_and_the_process_that_it_left_is_ended(run: Run) -> None:
    run.begin("proxy", restarts=True)
    ((proxy, left),) = run.lives("proxy")
    os.kill(proxy, signal.SIGKILL)
    again = run.lives("proxy", 2)[1]
    assert is_running(again[0]) and is_running(again[1])
    wait_for(lambda: not is_running(left))  # it was killed before the restart, and may take a moment to exit
    (said,) = run.said
    assert "the proxy process was killed by signal 9 and will be restarted (restart 1 of at most 5" in said
    assert not run.finished("proxy")
    run.stop()
    wait_for(lambda: not any(is_running(pid) for pid in again))
    events = [json.loads(line) for line in (run.folder / "processes.jsonl").read_text().splitlines()]
    assert [(e["process"], e["event"]) for e in events][:3] == [
        ("proxy", "started"), ("proxy", "died"), ("proxy", "restarted"),
    ]  # fmt: skip
    assert events[1]["detail"] == "was killed by signal 9"


def test_a_process_is_not_lost_if_an_interrupt_arrives_while_it_starts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def interrupted(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        begun.append(popen(*arguments, **options))  # type: ignore[call-overload]
        signal.raise_signal(signal.SIGINT)
        return begun[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(Interrupted), interruptible():
        run.begin("trainer", restarts=False)
    run.stop()
    assert len(begun) == 1 and begun[0].returncode is not None


def test_too_many_deaths_end_the_run(run: Run) -> None:
    run.begin("engine", restarts=True)
    with pytest.raises(ChildDied, match="the engine process was killed by signal 9"):
        for life in range(1, MOST_RESTARTS + 3):
            os.kill(run.lives("engine", life)[-1][0], signal.SIGKILL)
    assert len(run.said) == MOST_RESTARTS and len(run.lives("engine")) == MOST_RESTARTS + 1


def test_the_error_of_a_dead_process_does_not_quote_the_log_of_an_earlier_run(run: Run) -> None:
    (run.folder / "rollout.log").write_text("the error of an earlier run\n")
    run.begin("rollout", "1", restarts=False)
    with pytest.raises(ChildDied) as died:
        wait_for(lambda: False, run.check)
    assert "the rollout process ended with exit code 1" in str(died.value)
    assert "an earlier run" not in str(died.value)


def test_a_process_that_fails_early_or_is_terminated_is_not_restarted(run: Run) -> None:
    run.begin("proxy", "1", restarts=True)  # as with a bad configuration
    with pytest.raises(ChildDied, match="the proxy process ended with exit code 1"):
        wait_for(lambda: False, run.check)
    assert run.finished("proxy")
    run.begin("proxy", restarts=True)
    os.kill(run.lives("proxy", 2)[1][0], signal.SIGTERM)
    with pytest.raises(ChildDied, match="killed by signal 15"):
        wait_for(lambda: False, run.check)


def test_a_process_that_fails_late_is_restarted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_children, "STABLE_AFTER_S", 0.0)
    run.begin("rollout", "1", restarts=True)
    run.lives("rollout", 2)
    assert "ended with exit code 1 and will be restarted" in run.said[0]


def test_each_process_has_its_own_stop_timeout(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that writes a checkpoint is waited for, while a rollout process that hangs is killed."""
    monkeypatch.setattr(launch_children, "SOON_S", 0.0)
    (run.folder / "ending.py").write_text(
        "import os, signal, sys, time\n"
        "def end(*_):\n    time.sleep(float(sys.argv[2]))\n    open(sys.argv[1] + '.ended', 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "open(sys.argv[1], 'w').write(os.environ['AREAL_AGENTS_SUPERVISED_S'])\n"
        "time.sleep(600)\n"
    )
    run._stop_timeout_s = 1
    for name, ending_s, limit_s in (("trainer", "3", 120.0), ("rollout", "600", None)):
        mark = str(run.folder / name)
        run.start(
            name, [mark, ending_s], log=run.folder / f"{name}.log", environment={}, module="ending",
            stop_timeout_s=limit_s,
        )  # fmt: skip
    marks = [run.folder / name for name in ("trainer", "rollout")]
    wait_for(lambda: all(mark.exists() and mark.read_text() for mark in marks), run.check)
    assert [mark.read_text() for mark in marks] == ["120", "20"]
    run.stop()
    assert (run.folder / "trainer.ended").exists() and not (run.folder / "rollout.ended").exists()
    assert "waiting for trainer to end, for at most 120 s" in run.said


def test_the_death_of_the_trainer_ends_the_run(run: Run) -> None:
    run.begin("trainer", restarts=False)
    os.kill(run.lives("trainer")[0][0], signal.SIGKILL)
    with pytest.raises(ChildDied, match="the trainer process was killed by signal 9"):
        wait_for(lambda: False, run.check)
    assert run.said == [] and run.finished("trainer")
