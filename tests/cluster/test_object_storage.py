"""A run at two sites: the trainer and the engine have different run folders, and share only a bucket and the
store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from run_support import kill_with_descendants

from areal_agents.store import Store
from areal_agents.store.roles import Role

sys.path.insert(0, str(Path(__file__).parents[1] / "object_storage"))
from s3_server import S3Server  # noqa: E402

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]
QUICK_START = REPOSITORY / "examples/search_agent/config.yaml"
STEPS = 4
GROUPS = 2
RUN_S = 1800.0  # the longest time until the run ends
ROLES: tuple[Role, ...] = ("engine", "proxy", "trainer", "rollout")


@pytest.fixture
def url() -> Iterator[str]:
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    with PostgresServer() as server:
        yield server.new_store()


@pytest.fixture
def bucket() -> Iterator[S3Server]:
    if (missing := S3Server.missing()) is not None:
        pytest.skip(missing)
    with S3Server() as server:
        yield server


class Place:
    """Keeps one process of a run running in a given run folder, as a service manager does."""

    def __init__(self, role: Role, url: str, folder: Path, environment: dict[str, str]) -> None:
        self.role, self._environment = role, environment
        self._command = [
            sys.executable, "-m", "areal_agents", "role", role, "--run", url, "--run-dir", str(folder),
        ]  # fmt: skip
        self.log = folder.with_name(f"{role}.log")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def kill(self) -> None:
        """Kill the process and all its descendants, as the loss of its machine would."""
        kill_with_descendants(self._process.pid)

    def stop(self) -> None:
        """Begin to end the process."""
        self._stop.set()

    def join(self) -> None:
        """Wait until the process has ended."""
        self._thread.join()

    def _keep(self) -> None:
        with open(self.log, "ab") as log:
            while not self._stop.is_set():
                self._process = subprocess.Popen(
                    self._command, stdout=log, stderr=log, cwd=REPOSITORY, env=self._environment
                )
                while self._process.poll() is None and not self._stop.is_set():
                    time.sleep(0.1)
                if self._process.returncode == 0:
                    break
            self._process.terminate()
            try:
                self._process.wait(60)
            finally:
                self._process.kill()


@contextmanager
def supervisor(
    arguments: Sequence[str], log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "areal_agents", "train", str(QUICK_START), "--launcher", "external"]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, *arguments], stdout=output, stderr=output, cwd=REPOSITORY, env=environment
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(180)


@pytest.mark.timeout(RUN_S + 600)
def test_adapters_reach_an_engine_at_another_site_when_processes_are_killed(
    url: str, bucket: S3Server, tmp_path: Path
) -> None:
    trainer_site, engine_site = tmp_path / "a" / "run", tmp_path / "b" / "run"
    engine_site.parent.mkdir()
    log = tmp_path / "supervisor.log"
    environment = {**os.environ, **bucket.environment}
    environment.pop("AREAL_AGENTS_ADMIN_KEY", None)
    arguments = [
        f"run_dir={trainer_site}", f"store.url={url}", f"trainer.steps={STEPS}", "eval=null", "trial=false",
        f"rollout.groups={GROUPS}", "rollout.group_size=4", "rollout.max_staleness=1",
        "trainer.lora.rank=4", "trainer.checkpoint_every=1",
        "trainer.publish.transport=object_storage", "trainer.publish.location=s3://weights/team",
        "cluster.cpus.engine=1", "cluster.cpus.trainer=1",
    ]  # fmt: skip
    places: dict[Role, Place] = {}
    deadline = time.monotonic() + RUN_S
    with supervisor(arguments, log, environment) as process, Store.open(url) as store:
        try:
            wait(lambda: "rollout-0: external" in log.read_text(), process, log, deadline)
            for role in ROLES:
                site = trainer_site if role == "trainer" else engine_site
                places[role] = Place(role, url, site, environment)
            wait(lambda: store.max_version() >= 1, process, log, deadline)
            places["engine"].kill()
            wait(lambda: store.max_version() >= 2, process, log, deadline)
            places["trainer"].kill()  # the restarted trainer resumes from a checkpoint
            assert process.wait(max(1.0, deadline - time.monotonic())) == 0, log.read_text()
        finally:
            for place in places.values():
                place.stop()
            for place in places.values():
                place.join()
        trained = [len(store.groups_of_step(step)) for step in range(1, STEPS + 1)]
        versions = [row.version for row in store.published_versions()]
        run_id = store.run_id()
    assert trained == [GROUPS] * STEPS
    assert versions == list(range(len(versions))) and len(versions) >= STEPS + 1
    served = re.findall(r"the engine serves version (\d+)", places["engine"].log.read_text())
    assert int(served[-1]) == versions[-1] and list(map(int, served)) == sorted(map(int, served))
    assert not (engine_site / "metrics.jsonl").exists() and not (trainer_site / "weights/engine-0").exists()
    assert {path.name for path in (engine_site / "weights/engine-0").glob("v?")} == {
        f"v{version}" for version in versions[-2:]
    }
    for text in (log.read_text(), *(place.log.read_text() for place in places.values())):
        assert "test-secret" not in text
    assert run_id.startswith("run-")


def wait(is_so: Callable[[], bool], process: subprocess.Popen, log: Path, deadline: float) -> None:
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
