"""Matrix products for the CPU kernels, in vector code that sums in one fixed order.

An element of the result is one chain of fused multiply-adds over k, so a row's result does not depend on the
other rows of the call. Compilers do not keep a block of sums in registers by themselves, which
is worth a factor of two, so the inner loops are written as LLVM's vector instructions.

numba caches the compiled code of kernels.py until that file changes: touch it whenever you change this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_WORD, _FLOAT = ir.IntType(64), ir.FloatType()
_WIDE = binding.get_host_cpu_features().get("avx512f", False)
_LANES = 16 if _WIDE else 8
_ROWS = (4, 2, 1)  # of a block of sums; with its vectors, as many as fit in registers beside the operands
_VECTORS = (4, 2, 1) if _WIDE else (2, 1)


@numba.njit(nogil=True, cache=True, error_model="numpy", inline="never")
def product(
    a: int, a_stride: int, w: int, w_stride: int, c: int, c_stride: int,
    rows: int, depth: int, width: int, fresh: bool,
) -> None:  # fmt: skip
    """c += a @ w, or c = a @ w if `fresh`, for a [rows, depth], w [depth, width], c [rows, width], float32.

    Matrices are given by address; the elements of a row are contiguous, and strides count elements.
    """
    _product(a, a_stride, w, w_stride, c, c_stride, rows, depth, width, fresh)


@intrinsic
def _product(
    typing: Any, a: Any, a_stride: Any, w: Any, w_stride: Any, c: Any, c_stride: Any,
    rows: Any, depth: Any, width: Any, fresh: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    signature = types.void(*[types.intp] * 9, types.boolean)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        a, a_stride, w, w_stride, c, c_stride, rows, depth, width, fresh = args
        left, right, out = (_Matrix(builder, *at) for at in ((a, a_stride), (w, w_stride), (c, c_stride)))
        done: ir.Value = _WORD(0)
        for lanes, vectors in [*((_LANES, count) for count in _VECTORS), (1, 1)]:
            columns = _WORD(lanes * vectors)
            panels = builder.udiv(builder.sub(width, done), columns)
            with cgutils.for_range(builder, panels) as panel:
                column = builder.add(done, builder.mul(panel.index, columns))
                row: ir.Value = _WORD(0)
                for height in _ROWS:
                    blocks = builder.udiv(builder.sub(rows, row), _WORD(height))
                    with cgutils.for_range(builder, blocks) as block:
                        first = builder.add(row, builder.mul(block.index, _WORD(height)))
                        sums = _Block(builder, height, vectors, lanes)
                        sums.begin(out, first, column, fresh)
                        with cgutils.for_range(builder, depth) as step:
                            sums.add(left, right, first, column, step.index)
                        sums.end(out, first, column)
                    row = builder.add(row, builder.mul(blocks, _WORD(height)))
            done = builder.add(done, builder.mul(panels, columns))
        return context.get_dummy_value()

    return signature, emit


class _Matrix:
    """A matrix in memory, for the code being generated."""

    def __init__(self, builder: ir.IRBuilder, address: ir.Value, stride: ir.Value) -> None:
        self._builder, self._stride = builder, stride
        self._base = builder.inttoptr(address, _FLOAT.as_pointer())

    def at(self, row: ir.Value, column: ir.Value) -> ir.Value:
        """Return the address of an element."""
        builder = self._builder
        return builder.gep(self._base, [builder.add(builder.mul(row, self._stride), column)])


class _Block:
    """A block of sums, held in registers: `height` rows of `vectors` vectors of `lanes` columns."""

    def __init__(self, builder: ir.IRBuilder, height: int, vectors: int, lanes: int) -> None:
        self._builder, self._lanes = builder, lanes
        self._kind = ir.VectorType(_FLOAT, lanes)
        self._vectors = vectors
        self._sums = [
            [cgutils.alloca_once(builder, self._kind) for _ in range(vectors)] for _ in range(height)
        ]

    def begin(self, out: _Matrix, row: ir.Value, column: ir.Value, fresh: ir.Value) -> None:
        """Set the sums to zero if `fresh`, else to the elements of `out`."""
        builder = self._builder
        with builder.if_else(fresh) as (zero, there):
            with zero:
                for sums in self._sums:
                    for place in sums:
                        builder.store(self._kind(None), place)
            with there:
                for i, sums in enumerate(self._sums):
                    for j, place in enumerate(sums):
                        builder.store(self._vector(self._at(out, row, column, i, j)), place)

    def add(self, left: _Matrix, right: _Matrix, row: ir.Value, column: ir.Value, k: ir.Value) -> None:
        """Add the products of term k."""
        builder = self._builder
        weights = [
            self._vector(right.at(k, builder.add(column, _WORD(j * self._lanes))))
            for j in range(self._vectors)
        ]
        for i, sums in enumerate(self._sums):
            one = builder.load(left.at(builder.add(row, _WORD(i)), k), align=4)
            term = self._splat(one)
            for weight, place in zip(weights, sums, strict=True):
                times = builder.fmul(term, weight, flags=["contract"])
                builder.store(builder.fadd(builder.load(place), times, flags=["contract"]), place)

    def end(self, out: _Matrix, row: ir.Value, column: ir.Value) -> None:
        """Write the sums to `out`."""
        builder = self._builder
        for i, sums in enumerate(self._sums):
            for j, place in enumerate(sums):
                at = builder.bitcast(self._at(out, row, column, i, j), self._kind.as_pointer())
                builder.store(builder.load(place), at, align=4)

    def _at(self, matrix: _Matrix, row: ir.Value, column: ir.Value, i: int, j: int) -> ir.Value:
        builder = self._builder
        return matrix.at(builder.add(row, _WORD(i)), builder.add(column, _WORD(j * self._lanes)))

    def _vector(self, at: ir.Value) -> ir.Value:
        return self._builder.load(self._builder.bitcast(at, self._kind.as_pointer()), align=4)

    def _splat(self, value: ir.Value) -> ir.Value:
        builder, undefined = self._builder, ir.Constant(self._kind, ir.Undefined)
        first = builder.insert_element(undefined, value, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self._lanes), [0] * self._lanes)
        return builder.shuffle_vector(first, undefined, zeros)
