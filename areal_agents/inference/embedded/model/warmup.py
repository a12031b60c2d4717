"""Runs one forward pass of each class of shapes before the port opens, so that no request has to wait."""

from __future__ import annotations

import numpy as np

from areal_agents.inference.embedded.model.runner import ModelRunner, Rows
from areal_agents.inference.embedded.scheduling.sampling import SamplingBatch


def warm_up(runner: ModelRunner) -> None:
    """Run a short prompt, a decode and a sample in slot 0; what they leave there is never read as valid."""
    for count in (4, 1):
        positions = np.arange(count, dtype=np.int32)
        rows = Rows(
            tokens=np.zeros(count, np.int32),
            slots=np.zeros(count, np.int32),
            positions=positions,
            prefix_slots=np.zeros(count, np.int32),
            prefix_lengths=np.zeros(count, np.int32),
            segment_starts=np.array([0, count], np.int32),
            outputs=positions[-1:].copy(),
        )
        logits = runner.forward(rows)
    runner.copy_prefix(0, 0, 1)
    one = np.ones(1, np.float32)
    runner.sample(
        logits,
        SamplingBatch(
            temperature=one,
            top_p=one,
            min_p=one * 0,
            top_k=np.zeros(1, np.int32),
            seeds=np.zeros(1, np.uint64),
            positions=np.zeros(1, np.int32),
        ),
    )
