"""Keeps the weights between the stages of a warm-up, prints how it goes, and ends it below a bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from warmup.network import Network


class Reporter:
    """Prints lines with the CPU-seconds since the start."""

    def __init__(self) -> None:
        self._start = time.process_time()

    def __call__(self, line: str) -> None:
        print(f"[{time.process_time() - self._start:6.0f} CPU-s] {line}", flush=True)


def resume_or(train: Callable[[], None], network: Network, folder: Path | None, stage: str) -> None:
    """Load the weights after `stage` from `folder` if they are there; otherwise train and save them."""
    if folder is None:
        train()
    elif (folder / f"{stage}.pt").exists():
        network.load_state_dict(torch.load(folder / f"{stage}.pt"))
    else:
        train()
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(network.state_dict(), folder / f"{stage}.pt")


def require_right(right: float, bar: float, *, stage: str, what: str, advice: str) -> None:
    """Raise RuntimeError if the share that is right after a stage is below the bar.

    What a model reads or copies wrongly after imitation caps what reinforcement learning can reach.

    Args:
        what: what is counted, such as "answers".
        advice: what to give more of, such as "--careful-steps".
    """
    if not right >= bar:  # NaN is below every bar
        raise RuntimeError(
            f"after stage {stage} {right:.3f} of the {what} are right, {bar} was required: "
            f"give it more {advice} or another --seed"
        )
