"""The estimate of the trainer's memory against what torch's allocator has handed out at most."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.memory.choices import reserve
from areal_agents.training.memory.estimate import TrainerMemory
from areal_agents.training.model.run_models import load_models
from areal_agents.training.step.step import StepOptions, train_batch
from benchmarks.gpu.parts import Here
from benchmarks.gpu.training import full_microbatches
from benchmarks.trainer.data import ALGORITHM, save_model

TOLERANCE = 0.15
GIB = 2**30


def memory(here: Here) -> dict[str, Any]:
    """Steps without recomputation, with all of it, with the optimizer on the host, and of an adapter.

    What does not fit on this GPU is left out. On a CPU, where nothing counts allocations, the estimate stands
    alone.
    """
    folder = save_model(here.scratch / "model", here.scale.shape, bfloat16=True, device=here.device)
    common = {"device": here.device, "dtype": "bfloat16", "microbatch_tokens": here.scale.tokens}
    cases: dict[str, dict[str, Any]] = {
        "whole": {"activation_checkpointing": "off"},
        "recomputed": {"activation_checkpointing": "full"},
        "offloaded": {"activation_checkpointing": "full", "offload": "optimizer"},
        "adapter": {"activation_checkpointing": "full", "lora": {"rank": 32}},
    }
    figures = {}
    with ranks(here.device) as joined:
        for name, settings in cases.items():
            config = TrainerConfig.model_validate({**common, **settings})
            figures[name] = _compared(name, config, folder, here, joined)
    return figures


def _compared(name: str, config: TrainerConfig, folder: Path, here: Here, joined: Ranks) -> dict[str, Any]:
    """Take steps as a run does, and compare the peak of the second one, which has the optimizer's state."""
    on_gpu, checkpointing = here.device == "cuda", config.activation_checkpointing
    assert checkpointing != "auto"
    estimated = TrainerMemory(config, ALGORITHM, folder, joined, on_gpu=on_gpu)
    peak = estimated.need(checkpointing, config.microbatch_tokens).peak
    figures: dict[str, Any] = {"estimated_gib": round(peak / GIB, 2)}
    del estimated
    if on_gpu:
        total = torch.cuda.get_device_properties(joined.device).total_memory
        if peak + reserve(total) > total:
            return figures | {"left_out": f"the GPU has {total / GIB:.1f} GiB"}
    before = _allocated(here, most=False)
    _step_twice(config, folder, here, joined)
    measured = _allocated(here, most=True) - before
    gc.collect()
    if not on_gpu:
        return figures
    torch.cuda.empty_cache()
    return figures | _judged(name, peak, measured)


def _judged(name: str, peak: int, measured: int) -> dict[str, float]:
    if abs(peak - measured) > TOLERANCE * measured:
        raise AssertionError(
            f"{name}: the estimate is {peak / GIB:.2f} GiB, and the allocator's peak {measured / GIB:.2f} "
            f"GiB, expected a difference of at most {TOLERANCE:.0%}"
        )
    return {"measured_gib": round(measured / GIB, 2), "error": round(peak / measured - 1, 3)}


def _step_twice(config: TrainerConfig, folder: Path, here: Here, joined: Ranks) -> None:
    models = load_models(config, ALGORITHM, folder, joined)
    options = StepOptions(
        microbatch_tokens=config.microbatch_tokens, share_prefixes=False, grad_clip=config.grad_clip
    )
    data = full_microbatches(replace(here.scale, microbatches=2))
    for step in range(2):
        if here.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        train_batch(
            models.policy, models.optimizer, data, ALGORITHM, options, ranks=joined, version=step, seed=0
        )
    if here.device == "cuda":
        torch.cuda.synchronize()


def _allocated(here: Here, *, most: bool) -> int:
    if here.device == "cpu":
        return 0
    return torch.cuda.max_memory_allocated() if most else torch.cuda.memory_allocated()
