"""The sizes at which the parts are measured: on a GPU, and in miniature to test the code on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from areal_agents.algorithms.packing.flops import ModelShape

QWEN3_1_7B = ModelShape(
    layers=28, hidden=2048, heads=16, kv_heads=8, head_dim=128, intermediate=6144, vocab=151_936
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much each part computes.

    Attributes:
        shape: the model of the step.
        rows: rows of the attention that is timed; checked_rows: of the one that is compared with dense masks.
        tokens: tokens of a micro-batch; microbatches: number of them in a step; repeats: timed steps.
        prompt: tokens of the prompts that samples share, four times that of the answers.
        run_steps: steps of a whole run; large_steps: of the run of the step's model; quick_start_steps:
            of the quick start, 0 for all.
        episodes: episodes of one group of a run; evaluated: episodes of each evaluation of the quick start.
    """

    shape: ModelShape
    rows: int
    checked_rows: int
    tokens: int
    microbatches: int
    repeats: int
    prompt: int
    run_steps: int
    large_steps: int
    quick_start_steps: int
    episodes: int
    evaluated: int


FULL = Scale(
    shape=QWEN3_1_7B, rows=16_384, checked_rows=2048, tokens=8192, microbatches=8, repeats=4, prompt=1024,
    run_steps=3, large_steps=5, quick_start_steps=0, episodes=16, evaluated=256,
)  # fmt: skip
MINIATURE = Scale(
    shape=ModelShape(
        layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, intermediate=64, vocab=300
    ),
    rows=128, checked_rows=150, tokens=256, microbatches=2, repeats=1, prompt=40,
    run_steps=1, large_steps=3, quick_start_steps=1, episodes=8, evaluated=4,
)  # fmt: skip
