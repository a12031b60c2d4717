"""Measures the most memory that the ranks allocate on their GPUs."""

from __future__ import annotations

import torch

from areal_agents.training.distributed import Ranks


def start_peak(device: torch.device) -> None:
    """Begin to measure anew on this rank's device; a CPU is not measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(ranks: Ranks) -> int | None:
    """Return the largest peak of all ranks since `start_peak`, in bytes; None on a CPU. Collective."""
    if ranks.device.type != "cuda":
        return None
    peak = torch.tensor(torch.cuda.max_memory_allocated(ranks.device), device=ranks.device)
    return int(ranks.max(peak))
