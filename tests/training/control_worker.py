"""The program of the three ranks in test_control, which spawned processes import by name."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from areal_agents.training.control import RanksLost
from areal_agents.training.distributed import ranks

COUNT = 3


def parts() -> list[dict[str, Any]]:
    """Return what the first rank sends to each rank: arrays, some of them empty, and other values."""
    rng = np.random.default_rng(0)
    return [
        {
            "ids": rng.integers(0, 9, 100_000 * rank).astype(np.int32),
            "mask": rng.random(5) > 0.5,
            "empty": [np.empty((0, 3), np.float32)],
            "frozen": np.frombuffer(b"\1\2\3" * rank, np.uint8),
            "rank": rank,
        }
        for rank in range(COUNT)
    ]


def exchange() -> dict[str, Any]:
    """Return the result of each operation on this rank."""
    with ranks("cpu") as group:
        return {
            "scattered": group.scatter(parts() if group.is_first else None),
            "told": group.broadcast({"step": 3} if group.is_first else None),
            "any": [group.any(group.rank == one) for one in (0, 2, 7)],
            "sum": group.sum(torch.tensor([group.rank + 1.0])).item(),
        }


def late(released: Path) -> str:
    """Return the error that is raised when the last rank does not reach a barrier in time."""
    with ranks("cpu", timeout_s=60) as group:
        group.barrier()
        assert group.control is not None
        if group.is_first:  # which alone waits for a limited time
            _set_pg_timeout(timedelta(seconds=1), group.control._group)
        if group.rank == COUNT - 1:
            while not released.exists():
                time.sleep(0.05)
            return ""
        try:
            group.barrier()
        except RanksLost as error:
            released.touch()
            return str(error)
    return "no error"


def die() -> str:
    """Return the error that is raised when the last rank dies while the others wait in a collective."""
    try:
        with ranks("cpu", timeout_s=60) as group:
            group.barrier()
            if group.rank == COUNT - 1:
                os._exit(0)
            group.sum(torch.ones(10))
    except RanksLost as error:
        return str(error)
    return "no error"


def main(rank: int, ports: list[int], out: str) -> None:
    """Exchange values, wait for a rank that is late, and lose a rank that dies."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(COUNT), RANK=str(rank))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as with torchrun, no rank hosts the store
    results: dict[str, Any] = {}
    calls = {"exchanged": exchange, "late": lambda: late(Path(out) / "released"), "died": die}
    for port, (name, call) in zip(ports, calls.items(), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        torch.save(results, Path(out) / f"{rank}.pt")
        results[name] = call()
    torch.save(results, Path(out) / f"{rank}.pt")
