"""No rank holds the whole gradient of a real model: during a backward pass, a rank holds only the unsharded
gradients of the head and of one block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("fake_ranks_worker.py")


@pytest.mark.parametrize(
    ("model", "ranks", "replicas"),
    [
        ("qwen3-8b", 8, 1),
        ("tiny", 4, 2),
        pytest.param("4 blocks of qwen3-8b", 8, 2, marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", 64, 1, marks=pytest.mark.slow),
    ],
)
def test_no_gradient_is_unsharded_after_a_micro_batch_or_left_after_a_stop(
    model: str, ranks: int, replicas: int
) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER), model, str(ranks), str(replicas)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["after"] == [0, 0]
    assert 0 < found["within"] <= found["head"] + found["block"]
    assert found["kept"] == [found["shards"]] * 2
    assert found["dropped"] == 0
    assert found["shards"] == pytest.approx(found["model"] * replicas / ranks, rel=0.01)
