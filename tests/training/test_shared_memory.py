"""An NCCL error that is caused by a full /dev/shm says what to do."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from areal_agents.errors import TrainingError
from areal_agents.training.distributed import ranks
from areal_agents.training.shared_memory import explained, shortage

FULL = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.28.9\n"
    "Error while creating shared memory segment /dev/shm/nccl-6Tp1y7, error: No space left on device (28)"
)
UNEXPLAINED = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.28.9"


@pytest.mark.usefixtures("group")
def test_a_rank_whose_nccl_has_no_room_says_what_to_do() -> None:
    says = r"(?s)no room in /dev/shm, .* MB are free; .*--shm-size.*nccl-6Tp"
    with pytest.raises(TrainingError, match=says), ranks("cpu"):
        raise dist.DistBackendError(FULL)


@pytest.mark.parametrize(
    ("free_mb", "message", "is_explained"),
    [
        (10, UNEXPLAINED, True),
        (1000, UNEXPLAINED, False),  # another system call has failed
        (1000, FULL, True),  # the process that filled it has ended
        (10, "NCCL error: invalid usage", False),
        (10, "gloo/transport: No space left on device", False),
    ],
)
def test_only_errors_that_full_shared_memory_explains_are_explained(
    free_mb: int, message: str, is_explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_mb, f_frsize=1_000_000))
    said = explained(RuntimeError(message))
    assert said.endswith(message) and ("--shm-size" in said) == is_explained
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("free_mb", "processes", "is_short"),
    [(60, 1, False), (60, 2, True), (64, 2, False), (64, 8, True), (999, 64, True), (1000, 64, False)],
)
def test_there_is_a_warning_about_little_shared_memory(
    free_mb: int, processes: int, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_mb, f_frsize=1_000_000))
    said = shortage(processes)
    assert (said is not None) == is_short
    assert said is None or f"{free_mb} MB free" in said and "--shm-size" in said
