"""The interface of a runner: takes rows of tokens, returns logits, and keeps keys and values per slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from areal_agents.inference.embedded.model.weights import Weights
from areal_agents.inference.embedded.scheduling.sampling import SamplingBatch

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The tokens of one forward pass, N rows in S segments; a segment is the next tokens of one slot.

    Attributes:
        tokens, slots, positions: [N]; the rows of a segment are contiguous, their positions ascending by one.
        prefix_slots, prefix_lengths: [N] another slot whose first positions hold the same keys and values,
            and how many do. Read there they give the same result, faster where many slots share them.
        segment_starts: [S + 1] first row of each segment, then N.
        outputs: [M] the rows, ascending, whose logits are returned.
    """

    tokens: Int32
    slots: Int32
    positions: Int32
    prefix_slots: Int32
    prefix_lengths: Int32
    segment_starts: Int32
    outputs: Int32


class ModelRunner(Protocol):
    """A model with its keys and values. Not thread-safe: the scheduler's thread alone calls it."""

    @property
    def kind(self) -> Literal["numba", "torch"]:
        """The name of the kernels."""
        ...

    def place(self, weights: Weights) -> Weights:
        """Convert weights to the type and layout that this runner computes with. It is slow, any thread may
        call it, and weights that are already placed are shared, not copied."""
        ...

    def load(self, weights: Weights) -> None:
        """Replace the weights, at once if they are placed; keys and values stay as they are."""
        ...

    def unload(self) -> None:
        """Free the weights; call `load` before the next `forward`."""
        ...

    def free_cache(self) -> None:
        """Free the memory of all keys and values; call `make_cache` before the next `forward`."""
        ...

    def make_cache(self) -> None:
        """Allocate memory for keys and values."""
        ...

    def return_memory(self) -> None:
        """Return freed memory of the device to other processes. Any thread may call it."""
        ...

    def forward(self, rows: Rows) -> Tensor:
        """Store the rows' keys and values and return logits [M, V], float32, valid until the next call."""
        ...

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Int32, npt.NDArray[np.float32]]:
        """Sample tokens [M] with their logprobs [M] from logits [M, V]; see sampling.sample."""
        ...

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of the first `length` positions of slot `source` to slot `target`."""
        ...


def warm_up(runner: ModelRunner) -> None:
    """Run a short prompt, a decode and a sample, so that kernels are compiled before the port opens.

    They use slot 0; what they leave there is never read as valid.
    """
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
