"""Forward passes of the trainer and the engine run on fake CUDA tensors: no tensor is left on the CPU, and
kernels accept their arguments. Backward passes run on meta tensors, with the kernels of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.scale import MINIATURE
from benchmarks.trainer.data import save_model

ROOT = Path(__file__).parents[2]


def run_worker(name: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), str(folder), "300"],
        capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", MINIATURE.shape, bfloat16=True)


@pytest.mark.skipif(sys.platform != "linux", reason="finds torch's library by its name")
def test_forward_passes_run_on_fake_cuda_tensors(folder: Path) -> None:
    assert run_worker("fake_gpu_worker.py", folder) == [
        "documents torch.float32 (160,)",
        "tree torch.float32 (160,)",
        "engine torch.float32 (4, 300)",
        "refused FakeTensorDeviceMismatchError",
    ]


def test_backward_passes_run_with_the_kernels_of_a_gpu(folder: Path) -> None:
    """The model has two layers, and recomputed layers call their kernel twice. All trained weights get a
    gradient."""
    assert run_worker("meta_gpu_worker.py", folder) == [
        "documents ['varlen_attention'] 2 True",
        "tree ['flex_tree_attention'] 2 True",
        "recomputed ['varlen_attention'] 4 True",
        "adapter ['varlen_attention'] 2 True",
    ]
