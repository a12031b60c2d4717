"""The runner for float32 on a CPU: runs `kernels.forward` over segments on several threads.

Threads split the batch by sequence, never a sequence: each runs all layers for its own slots, so nothing has
to wait in between and results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from areal_agents.inference.embedded.model import kernels
from areal_agents.inference.embedded.model.architecture import Architecture
from areal_agents.inference.embedded.model.runner import Int32, Rows
from areal_agents.inference.embedded.model.weights import Weights
from areal_agents.inference.embedded.scheduling.sampling import Float32, SamplingBatch, sample

PARTS_PER_THREAD = 2
TURNED = ("lm_head", "qkv", "output", "gate_up", "down")  # the matrices that rows are multiplied with
MIN_ROWS = 8  # fewer rows are not worth waking a thread for


class NumbaRunner:
    """Weights as [in, out] matrices; kernels.py describes the layout of keys and values."""

    kind: Literal["numba"] = "numba"

    def __init__(
        self, arch: Architecture, *, slots: int, max_context: int, max_rows: int, threads: int
    ) -> None:
        self._arch = arch
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "engine-rows") if threads > 1 else None
        tiles = -(-max_context // kernels.TILE)
        self._cache_shape = (arch.layers, slots, arch.kv_heads, tiles)
        self._tile_shapes = (arch.head_dim, kernels.TILE), (kernels.TILE, arch.head_dim)
        self.make_cache()
        self._cos, self._sin = arch.rotary_tables(max_context)
        widths = (
            arch.hidden,
            arch.hidden,
            arch.qkv_width,
            arch.heads * arch.head_dim,
            2 * arch.feed_forward,
            arch.feed_forward,
        )
        self._work = [np.zeros((max_rows, width), np.float32) for width in widths]
        most = kernels.BLOCK * arch.heads // arch.kv_heads  # number of query rows that are computed together
        self._queries = np.zeros((threads, most * arch.head_dim), np.float32)
        # Not a power of two: rows would fall on the same few lines of the cache.
        self._scores = np.zeros((threads, most, tiles * kernels.TILE + 16), np.float32)
        self._sums = np.zeros((threads, most * arch.head_dim), np.float32)
        self._masses = np.zeros(arch.vocab_size, np.float32)
        self._logits = np.zeros((max_rows, arch.vocab_size), np.float32)
        self._shape = (arch.heads, arch.kv_heads, arch.head_dim, arch.head_norm)
        self._eps = np.float32(arch.norm_eps)
        self._scale = np.float32(arch.head_dim**-0.5)
        self._weights: tuple[Float32, ...] = ()

    def place(self, weights: Weights) -> Weights:
        """See ModelRunner.place. Matrices are stored as [in, out]: inner loops run over outputs."""
        return Weights(
            **{
                name: _in_layout(getattr(weights, name).float(), turned=name in TURNED)
                for name in Weights.__dataclass_fields__
            }
        )

    def load(self, weights: Weights) -> None:
        """See ModelRunner.load."""
        placed = self.place(weights)
        self._weights = tuple(
            (tensor.transpose(-1, -2) if name in TURNED else tensor).numpy()
            for name in Weights.__dataclass_fields__
            for tensor in (getattr(placed, name),)
        )

    def unload(self) -> None:
        """See ModelRunner.unload."""
        self._weights = ()

    def free_cache(self) -> None:
        """See ModelRunner.free_cache."""
        self._keys = self._values = np.zeros((0,) * 6, np.float32)

    def return_memory(self) -> None:
        """See ModelRunner.return_memory. The allocator of the host does it alone."""

    def make_cache(self) -> None:
        """See ModelRunner.make_cache."""
        of_keys, of_values = self._tile_shapes
        self._keys = np.zeros((*self._cache_shape, *of_keys), np.float32)
        self._values = np.zeros((*self._cache_shape, *of_values), np.float32)

    def forward(self, rows: Rows) -> Tensor:
        """See ModelRunner.forward."""
        assert self._weights, "load() comes before forward()"
        cuts = self._cuts(rows)
        turns = iter(range(len(cuts) - 1))
        helpers = [
            self._pool.submit(self._take_turns, rows, cuts, turns, helper)  # type: ignore[union-attr]
            for helper in range(1, min(self._threads, len(cuts) - 1))
        ]
        self._take_turns(rows, cuts, turns, 0)
        for helper in helpers:
            helper.result()
        return torch.from_numpy(self._logits[: len(rows.outputs)])

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Int32, Float32]:
        """See ModelRunner.sample. The method for a row depends only on its own parameters, never on the rest
        of the batch: torch samples truncated rows, the kernel all others."""
        tokens = np.empty(len(logits), np.int32)
        logprobs = np.empty(len(logits), np.float32)
        limited = batch.limited
        if not limited.any():
            kernels.sample(logits.numpy(), batch.temperature, batch.uniform(), tokens, logprobs, self._masses)
            return tokens, logprobs
        rows = np.flatnonzero(limited)
        tokens[rows], logprobs[rows] = sample(logits[torch.from_numpy(rows)], batch.select(rows))
        rows = np.flatnonzero(~limited)
        if len(rows):
            tokens[rows], logprobs[rows] = self.sample(logits[torch.from_numpy(rows)], batch.select(rows))
        return tokens, logprobs

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """See ModelRunner.copy_prefix. Whole tiles are copied; beyond `length` nothing is read as valid."""
        tiles = -(-length // kernels.TILE)
        kernels.copy_prefix(self._keys, source, target, tiles)
        kernels.copy_prefix(self._values, source, target, tiles)

    def _cuts(self, rows: Rows) -> list[int]:
        """Return the row indices at which the batch is split: at segment boundaries, into about equal parts,
        more than there are threads.

        A thread that is descheduled for a while then delays one part, not half of the batch.
        """
        total = len(rows.tokens)
        parts = min(PARTS_PER_THREAD * self._threads, total // MIN_ROWS) if self._threads > 1 else 1
        wanted = [total * part // parts for part in range(1, parts)]
        inner = {int(rows.segment_starts[np.searchsorted(rows.segment_starts, row)]) for row in wanted}
        return sorted({0, total} | inner)

    def _take_turns(self, rows: Rows, cuts: list[int], turns: Iterator[int], thread: int) -> None:
        """Compute parts until none is left; `next` on a range iterator is atomic under the GIL."""
        for part in turns:
            self._run(rows, thread, cuts[part], cuts[part + 1])

    def _run(self, rows: Rows, thread: int, first: int, last: int) -> None:
        out_first, out_last = np.searchsorted(rows.outputs, (first, last))
        kernels.forward(
            rows.tokens[first:last],
            rows.slots[first:last],
            rows.positions[first:last],
            rows.prefix_slots[first:last],
            rows.prefix_lengths[first:last],
            rows.outputs[out_first:out_last] - np.int32(first),
            *self._weights,
            self._cos,
            self._sin,
            self._keys,
            self._values,
            *(buffer[first:last] for buffer in self._work),
            self._queries[thread],
            self._scores[thread],
            self._sums[thread],
            self._logits[out_first:out_last],
            self._shape,
            self._eps,
            self._scale,
        )


def _in_layout(tensor: Tensor, *, turned: bool) -> Tensor:
    """Return `tensor` if it has the wanted memory layout, else a copy that has."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if turned else tensor.contiguous()
