"""Measures the MFU of a 1.7B model in bfloat16 on a GPU, and which kernels take the time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.samples import TrainingData
from areal_agents.training.distributed import Ranks
from areal_agents.training.metrics.mfu import mfu, peak_flops
from benchmarks.trainer.data import Recorder, save_model, training_data
from benchmarks.trainer.peers import Ours, Setting

QWEN3_1_7B = ModelShape(
    layers=28, hidden=2048, heads=16, kv_heads=8, head_dim=128, intermediate=6144, vocab=151_936
)
TOKENS = 8192  # tokens of a micro-batch
MICROBATCHES, REPEATS, TOP = 8, 5, 12


def measure_gpu(scratch: Path, joined: Ranks) -> dict[str, Any]:
    """Measure tokens per second, MFU, peak memory, and the kernels that take most of the time.

    Args:
        joined: the ranks, on a GPU.
    """
    folder = save_model(scratch / "1.7b", QWEN3_1_7B, bfloat16=True)
    side = Ours(Setting(folder, torch.bfloat16, TOKENS, joined), share_prefixes=False)
    data = _full_microbatches()
    side.step(data)  # kernels are compiled and selected
    torch.cuda.reset_peak_memory_stats()
    best, flops = float("inf"), 0.0
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        flops = side.step(data).flops
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    used = mfu(flops, seconds=best, devices=joined.count, peak=peak_flops(joined.device))
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        side.step(data)
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    return {
        "tokens_per_s_1_7b": round(sum(len(sample) for sample in data.samples) / best),
        "mfu": None if used is None else round(used, 3),
        "peak_gb_1_7b": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "profile": {row.key[:60]: round(row.self_device_time_total / total, 3) for row in rows[:TOP]},
        "gpu": torch.cuda.get_device_name(joined.device),
    }


def _full_microbatches() -> TrainingData:
    """Samples that fill each micro-batch: four samples of a quarter each, of which nearly all tokens are
    trained."""
    recorder = Recorder(QWEN3_1_7B.vocab, seed=3)
    prompt = 64
    groups = [
        recorder.answers(g, prompt=prompt, lengths=[TOKENS // 4 - prompt] * 4) for g in range(MICROBATCHES)
    ]
    return training_data(groups)
