"""A real run as a user starts it, and kill -9 for any of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import chaos_agent
import yaml

from areal_agents.launch.run_folder import RunFolder
from areal_agents.process_control import RUN_MARK, end_process

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
GROUPS, GROUP_SIZE = 2, 2
CHECKPOINT_EVERY = 2
ENDLESS = 1_000_000
START_TIMEOUT_S = 120.0

CONFIG = {
    "model": str(MODEL),
    "agent": f"{chaos_agent.__file__}:talk",
    "trial": False,  # its episodes would appear in the log of the agents
    "data": {"path": f"{chaos_agent.__file__}:tasks"},
    # No group may be dropped for its staleness or its scores: each completed episode must be trained.
    "rollout": {
        "groups": GROUPS, "group_size": GROUP_SIZE, "max_staleness": 4, "concurrency": 4, "workers": 4,
        "retries": 100, "give_up_after": 100_000,
    },
    "algorithm": {"drop_equal_groups": False, "replay": "recent", "replay_groups": 1, "replay_uses": 3},
    # The versions differ so much that logprobs identify their version; all versions are kept for comparison.
    "trainer": {
        "lr": 3e-3, "checkpoint_every": CHECKPOINT_EVERY, "keep_weights": 100_000, "trackers": [],
        "device": "cpu",
    },
    "engine": {"device": "cpu", "slots": 16},
    "proxy": {"workers": 2},
}  # fmt: skip

ROLES = ("trainer", "proxy", "worker", "engine", "rollout", "agent", "supervisor")
# Roles that other processes of the run start, each with a word of its command line.
INNER = {"agent": b"areal_agents.rollout.agents.worker", "worker": b"areal_agents.proxy.workers.process"}


class NotInTime(AssertionError):
    """The run did not reach the expected state in time."""


@dataclass(frozen=True, slots=True)
class Start:
    """The state before a start: the largest version, -1 without one, and the newest checkpoint on disk."""

    version: int
    checkpoint: int


@dataclass(slots=True)
class ChaosRun:
    """A run in `root` that is started, killed and restarted.

    Attributes:
        settings: overrides of its configuration; environment: variables in addition to this process's.
        deaths: the roles killed so far; starts: one entry for each call of `areal-agents train`.
        watch: called repeatedly during each wait for the run.
    """

    root: Path
    settings: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    watch: Callable[[], object] = lambda: None
    _supervisor: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> RunFolder:
        """The folder of the run's files."""
        return RunFolder(self.root / "run")

    @property
    def agent_log(self) -> Path:
        """The file in which the agents record their responses."""
        return self.root / "agents.jsonl"

    @property
    def output(self) -> Path:
        """The file with the output of `areal-agents train`."""
        return self.root / "output.txt"

    def start(self, *, steps: int = ENDLESS) -> None:
        """Run `areal-agents train CONFIG`, which resumes the run if there is one."""
        self.root.mkdir(parents=True, exist_ok=True)
        config = self.root / "chaos.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        overrides = [f"run_dir={self.folder.root}", f"trainer.steps={steps}", *self.settings]
        command = [sys.executable, "-m", "areal_agents.cli", "train", str(config), *overrides]
        found = Start(self.version, self.checkpoint)
        environment = {**os.environ, chaos_agent.LOG_VARIABLE: str(self.agent_log), **self.environment}
        with open(self.output, "ab") as output:
            self._supervisor = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        self.starts.append(found)

    def finish(self, *, timeout_s: float = 240.0) -> int:
        """Wait until the command has ended, and return its exit code."""
        assert self._supervisor is not None
        self.wait_for(lambda: self.has_ended, timeout_s=timeout_s)
        return self._supervisor.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended."""
        return self._supervisor is None or self._supervisor.poll() is not None

    def wait_for(self, condition: Callable[[], bool], *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for a condition. Raise NotInTime, with the end of the output, if it is not true in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise NotInTime(self.output.read_text()[-3000:])
            self.watch()
            time.sleep(0.05)

    def wait_for_steps(self, more: int, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until `more` further steps are trained. Raise NotInTime also if the command ends first."""
        target = self.steps + more

        def reached() -> bool:
            if self.has_ended:
                raise NotInTime("the run has ended:\n" + self.output.read_text()[-3000:])
            return self.steps >= target

        self.wait_for(reached, timeout_s=timeout_s)

    @property
    def steps(self) -> int:
        """The last step in metrics.jsonl."""
        metrics = self.metrics()
        return int(metrics[-1]["step"]) if metrics else 0

    @property
    def version(self) -> int:
        """The largest published version, -1 before the first."""
        if not self.folder.store.exists():
            return -1
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with sqlite3.connect(f"file:{self.folder.store}?mode=ro", uri=True, timeout=30) as connection:
                    found = connection.execute("SELECT COALESCE(MAX(version), -1) FROM versions").fetchone()
                    return int(found[0])
            except sqlite3.OperationalError:  # being created, recovered, or closed by an ending process
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    @property
    def checkpoint(self) -> int:
        """The step of the newest checkpoint on the disk, 0 without one."""
        names = [path.name for path in (self.folder.root / "checkpoints").glob("step-*")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def kill(self, role: str, rng: random.Random) -> bool:
        """Send SIGKILL to one process of a role; return whether there was one that had not ended yet.

        After a kill that ends the command, wait until it has ended.
        """
        found = [self._supervisor.pid] if role == "supervisor" and self._supervisor else self.processes(role)
        if not found or self.has_ended:
            return False
        try:
            os.kill(rng.choice(found), signal.SIGKILL)
        except ProcessLookupError:  # it has ended since it was found
            return False
        if role in ("supervisor", "trainer"):
            self.finish()
            if role == "supervisor" and rng.random() < 0.5:  # else the next start overlaps their end
                self.wait_for(lambda: not self.processes())
        self.deaths.append(role)
        return True

    def stop(self) -> None:
        """Interrupt the command, as Ctrl-C does, and wait until it has ended."""
        assert self._supervisor is not None
        self._supervisor.send_signal(signal.SIGINT)
        self.finish()

    def metrics(self) -> list[dict[str, float]]:
        """Return the complete lines of metrics.jsonl."""
        path = self.folder.metrics
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def processes(self, role: str = "") -> list[int]:
        """Return the ids of the processes of this run except its supervisor, or only those of a role."""
        found = []
        logs = str(self.folder.root / "logs")
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                marks = [variable for variable in variables if variable.startswith(RUN_MARK.encode())]
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if not marks or logs.encode() not in marks[0]:
                continue
            if not role or INNER.get(role, role.encode()) in arguments:
                found.append(int(entry.name))
        return found

    def end(self) -> None:
        """End all processes of the run, for the case that a test failed."""
        if not self.has_ended and self._supervisor is not None:
            end_process(self._supervisor, grace_s=90)
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):  # it has ended since it was found
                os.kill(process, signal.SIGKILL)
