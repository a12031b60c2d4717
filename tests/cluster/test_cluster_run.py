"""A whole run with two processes of each role on this machine, some of which are killed during the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from run_support import MANY, REPOSITORY, STOP_S, supervised

from areal_agents.store import Store
from areal_agents.store.roles import Role

QUICK_START = REPOSITORY / "examples/search_agent/config.yaml"
GROUPS = 8  # per step, in the quick start
RUN_S = 900.0
LOST: list[tuple[Role, int]] = [("engine", 1), ("proxy", 1), ("rollout", 0)]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(RUN_S + 2 * STOP_S)]


@pytest.fixture
def url() -> Iterator[str]:
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    with PostgresServer() as server:
        yield server.new_store()


def test_a_run_with_two_processes_per_role_loses_nothing_if_some_are_killed(url: str, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "supervisor.log"
    command = [
        sys.executable, "-m", "areal_agents", "train", str(QUICK_START), "--launcher", "local",
        f"run_dir={run}", f"store.url={url}", f"trainer.steps={MANY}", "eval=null", "trial=false",
        "engine.replicas=2",
        "cluster.proxies=2", "cluster.rollouts=2", "trainer.ranks=2", "trainer.nodes=2",
    ]  # fmt: skip
    with supervised(command, run, log, within_s=RUN_S) as running:
        for role, index in LOST:
            running.wait_for_step(running.steps() + 1)
            running.lose(url, role, index)
        running.wait_for_step(running.steps() + 2)
        steps = running.stop()
    with Store.open(url) as store:
        groups = store.group_counts()
        trained = [store.groups_of_step(step) for step in range(1, steps + 1)]
        rows = store.role_rows()
    assert [len(step) for step in trained] == [GROUPS] * steps
    assert groups["trained"] == steps * GROUPS
    epochs = {(row.role, row.index): row.epoch for row in rows}
    assert {place for place, epoch in epochs.items() if epoch > 1} == set(LOST)
    assert not any(row.is_alive for row in rows), "every process has left its place"
