"""The parts of the measurement, by name. Each runs in a process of its own: `python -m benchmarks.gpu`.

A part returns its figures, raises `Skipped` with the reason if it does not apply here, and raises any other
error if what it checks does not hold.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.scale import Scale

Device = Literal["cuda", "cpu"]


class Skipped(Exception):
    """A part does not apply here; the message says why."""


@dataclass(frozen=True, slots=True)
class Here:
    """Where and at which size a part runs.

    Attributes:
        scratch: a folder that is deleted at the end of the part.
    """

    device: Device
    scale: Scale
    scratch: Path


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        module, function: where its function is: `function(here) -> figures`.
        limit_s: seconds after which it counts as failed, the compilation of kernels included.
        beside: whether it may run at the same time as neighbours for which this is true too. A run of a small
            model spends most of its time starting processes, and most of them do not use the GPU.
    """

    what: str
    module: str
    function: str
    limit_s: float
    beside: bool = False


# In the order of their value, because the last ones may find no time left: whether the kernels are right,
# how fast a step is and what it takes, whether runs work; then what is known in part from these.
PARTS: dict[str, Part] = {
    "attention": Part("attention kernels against dense masks", "kernels", "attention", 150),
    "step": Part("one step of a 1.7B model", "training", "step", 150),
    "memory": Part("the estimate of memory against the allocator", "memory", "memory", 150),
    "loop": Part("a whole run on the embedded engine", "runs", "loop", 180, beside=True),
    "sleep": Part("a run whose engine sleeps while a step is trained", "runs", "sleep", 180, beside=True),
    "ipc": Part("a run that publishes by ipc", "runs", "ipc", 180, beside=True),
    "lora": Part("a run that trains an adapter", "runs", "lora", 180, beside=True),
    "head": Part("float32 logits of a bfloat16 head", "kernels", "head", 60),
    "engine": Part("the embedded engine, asleep and awake", "engine", "engine", 90),
    "publish": Part("a 1.7B model by ipc to an engine in another process", "publishing", "publish", 120),
    "large": Part("a whole run of a model of 1.4B parameters", "runs", "large", 150),
    "prefixes": Part("shared prefixes against flat samples", "training", "prefixes", 120),
    "fused": Part("the step with compiled blocks, and with Liger's kernels", "training", "fused", 240),
    "quickstart": Part("the quick start, end to end", "runs", "quick_start", 300),
}


def measure(name: str, here: Here) -> dict[str, Any]:
    """Run a part in this process and return its figures. Raises what the part raises."""
    part = PARTS[name]
    function: Callable[[Here], dict[str, Any]] = getattr(
        importlib.import_module(f"benchmarks.gpu.{part.module}"), part.function
    )
    return function(here)
