"""Which groups a rollout process may take over, and its part of the concurrent episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_agents.rollout.worker_share import WorkerShare
from areal_agents.store import Store


def test_only_groups_of_processes_that_do_not_run_may_be_taken_over(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        own = store.claim_role("rollout", 0, host="a", pid=1)
        other = store.claim_role("rollout", 1, host="b", pid=2)
        worker = WorkerShare.of_place(store, index=0, count=2, epoch=own.epoch)
        assert worker.may_take(None)
        assert not worker.may_take(worker.name) and worker.has_left(worker.name)
        assert not worker.may_take("rollout-1-1") and not worker.has_left("rollout-1-1")
        store.leave_role("rollout", 1, other.epoch)
        assert worker.may_take("rollout-1-1") and worker.has_left("rollout-1-1")
        store.claim_role("rollout", 1, host="c", pid=3)
        assert worker.may_take("rollout-1-1") and not worker.may_take("rollout-1-2")


@pytest.mark.parametrize(("total", "count", "parts"), [(64, 2, [32, 32]), (5, 3, [2, 2, 1]), (1, 2, [1, 1])])
def test_the_concurrent_episodes_are_divided_among_the_processes(
    total: int, count: int, parts: list[int]
) -> None:
    shares = [WorkerShare(index, count, f"r{index}", lambda name: True) for index in range(count)]
    assert [share.part_of(total) for share in shares] == parts
