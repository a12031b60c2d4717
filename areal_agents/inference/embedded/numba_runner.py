"""The runner for a CPU in float32: `kernels.forward` over segments shared out to threads.

Threads split the batch by sequence, never a sequence: each runs all layers for its own slots, so nothing has
to wait in between and results do not depend on the number of threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_agents.errors import ConfigError
from areal_agents.inference.embedded import kernels
from areal_agents.inference.embedded.architecture import Architecture
from areal_agents.inference.embedded.runner import Rows, checksum_arrays
from areal_agents.inference.embedded.weights import Weights

Float32 = npt.NDArray[np.float32]
_FLOATS_PER_LINE = 16


class NumbaRunner:
    """Weights as [in, out] matrices and caches [L, slot, kv head, head_dim, position]."""

    kind: Literal["numba"] = "numba"

    def __init__(self, arch: Architecture, *, slots: int, max_context: int, max_rows: int, threads: int) -> None:
        for name in ("hidden", "head_dim", "feed_forward"):
            if getattr(arch, name) % 8:
                raise ConfigError(f"engine.kernel: numba needs {name} divisible by 8, got {getattr(arch, name)}")
        self._arch = arch
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "engine-rows") if threads > 1 else None
        # An odd number of cache lines per row: rows a power of two apart would share the same cache sets.
        lines = -(-max_context // _FLOATS_PER_LINE) | 1
        shape = (arch.layers, slots, arch.kv_heads, arch.head_dim, lines * _FLOATS_PER_LINE)
        self._keys = np.zeros(shape, np.float32)
        self._values = np.zeros(shape, np.float32)
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
        self._scores = np.zeros((threads, 2, shape[-1]), np.float32)
        self._logits = np.zeros((max_rows, arch.vocab_size), np.float32)
        self._shape = (arch.heads, arch.kv_heads, arch.head_dim, arch.head_norm)
        self._eps = np.float32(arch.norm_eps)
        self._scale = np.float32(arch.head_dim**-0.5)
        self._weights: tuple[Float32, ...] = ()

    def load(self, weights: Weights) -> None:
        """Transpose the matrices to [in, out] once, so that the inner loops run along contiguous outputs."""

        def plain(tensor: Tensor) -> Float32:
            return np.ascontiguousarray(tensor.float().numpy())

        def turned(tensor: Tensor) -> Float32:
            return np.ascontiguousarray(tensor.float().transpose(-1, -2).numpy())

        self._weights = (
            plain(weights.embedding),
            turned(weights.lm_head),
            plain(weights.final_norm),
            plain(weights.attention_norm),
            turned(weights.qkv),
            plain(weights.qkv_bias),
            plain(weights.q_norm),
            plain(weights.k_norm),
            turned(weights.output),
            plain(weights.mlp_norm),
            turned(weights.gate_up),
            turned(weights.down),
        )

    def forward(self, rows: Rows) -> Tensor:
        """See Runner.forward."""
        cuts = self._cuts(rows)
        waiting = [
            self._pool.submit(self._run, rows, part, cuts[part], cuts[part + 1])  # type: ignore[union-attr]
            for part in range(1, len(cuts) - 1)
        ]
        self._run(rows, 0, cuts[0], cuts[1])
        for future in waiting:
            future.result()
        return torch.from_numpy(self._logits[: len(rows.outputs)])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """See Runner.copy_prefix."""
        kernels.copy_prefix(self._keys, source, target, length)
        kernels.copy_prefix(self._values, source, target, length)

    def checksum(self) -> str:
        """See Runner.checksum."""
        return checksum_arrays(list(self._weights))

    def _cuts(self, rows: Rows) -> list[int]:
        """Row indices at which the batch is cut for the threads: segment boundaries, about equal work."""
        total = len(rows.tokens)
        parts = min(self._threads, len(rows.segment_starts) - 1)
        wanted = [total * part // parts for part in range(1, parts)]
        inner = {int(rows.segment_starts[np.searchsorted(rows.segment_starts, row)]) for row in wanted}
        return sorted({0, total} | inner)

    def _run(self, rows: Rows, part: int, first: int, last: int) -> None:
        out_first, out_last = np.searchsorted(rows.outputs, (first, last))
        kernels.forward(
            rows.tokens[first:last],
            rows.slots[first:last],
            rows.positions[first:last],
            rows.outputs[out_first:out_last] - np.int32(first),
            *self._weights,
            self._cos,
            self._sin,
            self._keys,
            self._values,
            *(buffer[first:last] for buffer in self._work),
            self._scores[part],
            self._logits[out_first:out_last],
            self._shape,
            self._eps,
            self._scale,
        )
