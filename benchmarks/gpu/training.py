"""The trainer's step on a model of 1.7B parameters: speed, MFU, memory, and what takes the time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from areal_agents.algorithms.samples import TrainingData
from areal_agents.errors import TrainingError
from areal_agents.training.config import Fused
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.metrics.mfu import mfu, peak_flops
from benchmarks.gpu.parts import Here
from benchmarks.gpu.scale import Scale
from benchmarks.trainer.data import Recorder, save_model, training_data
from benchmarks.trainer.peers import Ours, Setting

TOP = 12  # entries of the profile
FUSED: tuple[Fused, ...] = ("none", "compile", "liger")
NORM_ERROR = 0.02  # bfloat16 rounds otherwise where operations are fused


def step(here: Here) -> dict[str, Any]:
    """Tokens per second, MFU, peak memory, and the kernels that take most of the time."""
    with ranks(here.device) as joined:
        side = Ours(_setting(here, joined), share_prefixes=False)
        return measured_step(side, here.scale, joined) | {"profile": _profile(side, here)}


def fused(here: Here) -> dict[str, Any]:
    """The step with each value of `trainer.fused`, and how far the gradient's norm is from that of none."""
    figures: dict[str, Any] = {}
    norms: dict[str, float] = {}
    with ranks(here.device) as joined:
        setting = _setting(here, joined)
        for value in FUSED:
            try:
                side = Ours(replace(setting, fused=value), share_prefixes=False)
            except TrainingError as error:
                figures[f"{value}_skipped"] = str(error)
                continue
            norms[value] = side.step(full_microbatches(here.scale)).grad_norm
            difference = abs(norms[value] - norms["none"]) / norms["none"]
            assert difference < NORM_ERROR, f"fused: {value} changes the gradient's norm by {difference:.1%}"
            figures |= {f"{value}_{key}": n for key, n in measured_step(side, here.scale, joined).items()}
            figures[f"{value}_norm_difference"] = round(difference, 5)
            del side
            if here.device == "cuda":
                torch.cuda.empty_cache()
    return figures


def measured_step(side: Ours, scale: Scale, joined: Ranks) -> dict[str, Any]:
    """Time steps on full micro-batches."""
    on_gpu, data = joined.device.type == "cuda", full_microbatches(scale)
    side.step(data)  # kernels are compiled and selected
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    best, flops = float("inf"), 0.0
    for _ in range(scale.repeats):
        started = time.perf_counter()
        flops = side.step(data).flops
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    used = mfu(flops, seconds=best, devices=joined.count, peak=peak_flops(joined.device))
    return {
        "tokens_per_s": round(sum(len(sample) for sample in data.samples) / best),
        "mfu": None if used is None else round(used, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else None,
    }


def full_microbatches(scale: Scale) -> TrainingData:
    """Samples that fill each micro-batch: four of a quarter each, of which nearly all tokens are trained."""
    recorder, prompt = Recorder(scale.shape.vocab, seed=3), scale.tokens // 128
    lengths = [scale.tokens // 4 - prompt] * 4
    return training_data(
        [recorder.answers(g, prompt=prompt, lengths=lengths) for g in range(scale.microbatches)]
    )


def prefixes(here: Here) -> dict[str, Any]:
    """The speed-up of shared prefixes, as a share of the one that the numbers of tokens allow."""
    from benchmarks.trainer.run import merged_tokens

    scale, recorder = here.scale, Recorder(here.scale.shape.vocab, seed=1)
    groups = [
        recorder.answers(g, prompt=scale.prompt, lengths=[scale.prompt // 4] * 8)
        for g in range(scale.microbatches)
    ]
    data = training_data(groups)
    seconds = []
    with ranks(here.device) as joined:
        side = Ours(_setting(here, joined))
        for shared in (False, True):
            side.share_prefixes(shared)
            side.step(data)
            best = float("inf")
            for _ in range(scale.repeats):
                started = time.perf_counter()
                side.step(data)
                if here.device == "cuda":
                    torch.cuda.synchronize()
                best = min(best, time.perf_counter() - started)
            seconds.append(best)
    bound = sum(len(sample) for sample in data.samples) / merged_tokens(data.samples)
    speed_up = seconds[0] / seconds[1]
    return {
        "speed_up": round(speed_up, 2),
        "bound": round(bound, 2),
        "share_of_bound": round(speed_up / bound, 3),
    }


def _setting(here: Here, joined: Ranks) -> Setting:
    folder = save_model(here.scratch / "model", here.scale.shape, bfloat16=True, device=here.device)
    return Setting(folder, torch.bfloat16, here.scale.tokens, joined)


def _profile(side: Ours, here: Here) -> dict[str, float]:
    """The share of the device's time that each of the longest kernels takes."""
    on_gpu = here.device == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        side.step(full_microbatches(here.scale))
        if on_gpu:
            torch.cuda.synchronize()
    spent = {
        row.key: row.self_device_time_total if on_gpu else row.self_cpu_time_total
        for row in recorded.key_averages()
    }
    total = sum(spent.values())
    longest = sorted(spent, key=spent.__getitem__, reverse=True)[:TOP]
    return {key[:60]: round(spent[key] / total, 3) for key in longest}
