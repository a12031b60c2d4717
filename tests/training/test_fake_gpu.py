"""The passes of trainer and engine on fake CUDA tensors: nothing is left on the CPU, and kernels take their
arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.scale import MINIATURE
from benchmarks.trainer.data import save_model

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="finds torch's library by its name")
def test_forward_passes_on_fake_cuda_tensors(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", MINIATURE.shape, bfloat16=True)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fake_gpu_worker.py")), str(folder), "300"],
        capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "documents torch.float32 (160,)",
        "tree torch.float32 (160,)",
        "engine torch.float32 (4, 300)",
        "refused FakeTensorDeviceMismatchError",
    ]
