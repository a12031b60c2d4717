"""Three gloo ranks exchange values, and their errors name a missing rank.

The ranks are spawned once for the module.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from control_worker import COUNT, main, parts
from torch.distributed import TCPStore

from areal_agents.training.distributed import use_threads


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank."""
    out = tmp_path_factory.mktemp("control")
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(3)]
    mp.spawn(main, ([store.port for store in stores], str(out)), nprocs=COUNT)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(COUNT)]


def test_each_rank_receives_its_own_part_and_the_value_for_all(spawned: list[dict[str, Any]]) -> None:
    for rank, (results, want) in enumerate(zip(spawned, parts(), strict=True)):
        got = results["exchanged"]
        part = got["scattered"]
        assert part["rank"] == rank and part["ids"].dtype == np.int32
        np.testing.assert_equal(part, want)
        assert got["told"] == {"step": 3} and got["any"] == [True, True, False] and got["sum"] == 6


def test_the_error_names_the_rank_that_is_late(spawned: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert spawned[rank]["late"].startswith(
            f"rank {rank}: rank 2 of 3 ended or did not come within the time limit (trainer.rank_timeout_s)"
        )


def test_the_error_names_the_rank_that_dies_in_a_collective(spawned: list[dict[str, Any]]) -> None:
    assert re.match(r"rank 2 on node 0 \(.+\) is lost: its process ended\.", spawned[0]["died"])
    assert re.match(r"rank 2 on node 0 \(.+\) is lost|rank 1: rank", spawned[1]["died"])
    assert "died" not in spawned[2]


def test_ranks_of_one_machine_divide_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        use_threads(0)
        assert torch.get_num_threads() == 6
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        use_threads(0)
        assert torch.get_num_threads() == 1
        torch.set_num_threads(8)
        use_threads(0)
        assert torch.get_num_threads() == 2
        use_threads(5)
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
