"""The matrix product of the CPU kernels: it is accurate, and a row does not depend on the other rows."""

from __future__ import annotations

import numpy as np
import pytest

from areal_agents.inference.embedded.model.products import product


def multiply(a: np.ndarray, w: np.ndarray, c: np.ndarray, *, fresh: bool) -> None:
    product(
        a.ctypes.data, a.shape[1], w.ctypes.data, w.shape[1], c.ctypes.data, c.shape[1],
        a.shape[0], a.shape[1], w.shape[1], fresh,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("depth", "width"), [(8, 1), (1, 5), (33, 85), (128, 64), (384, 1000), (64, 24)])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_product_is_accurate_and_no_row_depends_on_the_others(
    rows: int, depth: int, width: int, fresh: bool
) -> None:
    random = np.random.default_rng([rows, depth, width])
    a, w, before = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((rows, depth), (depth, width), (rows, width))
    )
    whole = before.copy()
    multiply(a, w, whole, fresh=fresh)
    exact = a.astype(np.float64) @ w + (0.0 if fresh else before)
    scale = np.abs(a).astype(np.float64) @ np.abs(w) + np.abs(before)
    assert (np.abs(whole - exact) <= 1e-6 * scale).all()
    for row in range(rows):
        alone = before[row : row + 1].copy()
        multiply(a[row : row + 1], w, alone, fresh=fresh)
        assert alone.tobytes() == whole[row : row + 1].tobytes()


def test_columns_outside_the_product_are_not_written() -> None:
    a, w = np.ones((3, 4), np.float32), np.ones((4, 20), np.float32)
    out = np.full((3, 50), 7.0, np.float32)
    product(a.ctypes.data, 4, w.ctypes.data, 20, out[:, 10:].ctypes.data, 50, 3, 4, 20, True)
    assert (out[:, 10:30] == 4.0).all()
    assert (out[:, :10] == 7.0).all() and (out[:, 30:] == 7.0).all()
