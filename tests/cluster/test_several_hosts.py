"""A run on several emulated hosts: a slow link, links that are cut and healed, and a lost host."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import namespaces
import pytest
from namespaces import Host, HostServer, mark_of, network, write_placing_program

from areal_agents.store import Store

REPOSITORY = Path(__file__).parents[2]
QUICK_START = REPOSITORY / "examples/search_agent/config.yaml"
STEPS = 8
RUN_S = 900.0  # the longest time until the last step
END_S = 300.0

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(RUN_S + 3 * END_S)]


@pytest.fixture
def hosts() -> Iterator[dict[str, Host]]:
    if (missing := namespaces.missing()) is not None:
        pytest.skip(missing)
    with network(["db", "engine", "other", "spare", "proxy", "trainer", "rollout"]) as found:
        yield found


def test_a_run_survives_a_slow_link_cut_links_and_a_lost_host(hosts: dict[str, Host], tmp_path: Path) -> None:
    placed = {
        "engine-0": [hosts["engine"]],
        "engine-1": [hosts["other"], hosts["spare"]],
        "proxy-0": [hosts["proxy"]],
        "trainer-0": [hosts["trainer"]],
        "rollout-0": [hosts["rollout"]],
    }
    programs = {name: write_placing_program(tmp_path / name, where) for name, where in placed.items()}
    places = tmp_path / "places.json"
    places.write_text(json.dumps({name: str(program) for name, program in programs.items()}))
    run = tmp_path / "run"
    hosts["rollout"].slow("20mbit")
    with HostServer(hosts["db"]) as server:
        url = server.new_store()
        command = [
            sys.executable, str(REPOSITORY / "tests/cluster/supervise_in_namespaces.py"), str(QUICK_START),
            str(places), f"run_dir={run}", f"store.url={url}", f"trainer.steps={STEPS}", "eval=null",
            "engine.replicas=2", "trial=false", "cluster.cpus.engine=1", "cluster.cpus.trainer=1",
        ]  # fmt: skip
        with open(tmp_path / "supervisor.log", "wb") as log:
            supervisor = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY)
        try:
            at_step = _Steps(supervisor, run, tmp_path / "supervisor.log")
            at_step.wait(1)
            for name in ("engine", "trainer", "db"):
                hosts[name].cut()
                time.sleep(5.0)  # how long the link is cut
                hosts[name].heal()
            at_step.wait(3)
            mark_of(programs["engine-1"], hosts["other"]).touch()
            hosts["other"].lose()
            at_step.wait(STEPS)
            assert supervisor.wait(END_S) == 0, (tmp_path / "supervisor.log").read_text()
        finally:
            supervisor.terminate()
            supervisor.wait(END_S)
        with Store.open(url) as store:
            groups = store.group_counts()
            engines = {row.index: row for row in store.role_rows("engine")}
    assert groups["trained"] == STEPS * 8 and not groups.get("dropped"), groups
    assert engines[1].host == hosts["spare"].address and engines[1].epoch == 2
    events = [json.loads(line) for line in (run / "logs/processes.jsonl").read_text().splitlines()]
    assert {event["process"] for event in events if event["event"] == "died"} == {"engine-1"}


class _Steps:
    """Waits until the run has trained a number of steps."""

    def __init__(self, supervisor: subprocess.Popen[bytes], run: Path, log: Path) -> None:
        self._supervisor, self._run, self._log = supervisor, run, log
        self._deadline = time.monotonic() + RUN_S

    def wait(self, steps: int) -> None:
        self._until(lambda: self._trained() >= steps)

    def _trained(self) -> int:
        file = self._run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            # The supervisor ends soon after the last step.
            assert self._supervisor.poll() is None or reached(), self._log.read_text()
            assert time.monotonic() < self._deadline, self._log.read_text()
            time.sleep(0.2)
