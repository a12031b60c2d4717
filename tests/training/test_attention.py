"""Packed tree attention against a dense float64 softmax over what each row may see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_agents.algorithms.token_tree import TokenTree, build_tree
from areal_agents.training.attention import gathered_attention, tree_attention

SCALE = 0.3


def make_tree() -> TokenTree:
    rng = np.random.default_rng(0)
    root, middle = rng.integers(0, 9, 37), rng.integers(0, 9, 21)
    sequences = [
        np.concatenate([root, rng.integers(10, 99, 40)]),
        np.concatenate([root, middle, rng.integers(10, 99, 5)]),
        np.concatenate([root, middle, rng.integers(10, 99, 70)]),
        np.concatenate([root, middle]),
        rng.integers(10, 99, 33),
    ]
    return build_tree(sequences, min_saved=1)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, tree: TokenTree) -> Tensor:
    """[1, H, T, D]: every row sees exactly the rows of the sequences that it is part of, up to itself."""
    size = len(tree.token_ids)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for rows in tree.rows:
        for position, row in enumerate(rows):
            seen[row, torch.from_numpy(rows[: position + 1])] = True
    repeats = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = (query @ keys.transpose(2, 3) * SCALE).masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1) @ values


def inputs(tree: TokenTree, heads: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, len(tree.token_ids), 16)] + [(1, groups, len(tree.token_ids), 16)] * 2
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("implementation", [tree_attention, gathered_attention])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_output_and_gradients_equal_dense_attention(implementation, heads: int, groups: int) -> None:  # type: ignore[no-untyped-def]
    tree = make_tree()
    assert max(sum(s.start < t.start < s.subtree_end for s in tree.segments) for t in tree.segments) == 2
    got_in, want_in = inputs(tree, heads, groups, torch.float32), inputs(tree, heads, groups, torch.float64)
    got = implementation(*got_in, tree.segments, SCALE)
    want = dense_attention(*want_in, tree)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)
    weights = torch.randn(want.shape, dtype=torch.float64)
    got_gradients = torch.autograd.grad(got, got_in, weights.float())
    want_gradients = torch.autograd.grad(want, want_in, weights)
    for got_gradient, want_gradient in zip(got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(got_gradient.double(), want_gradient, atol=1e-5, rtol=1e-4)


def test_bfloat16_takes_the_gathered_path_and_agrees_to_its_precision() -> None:
    tree = make_tree()
    query, key, value = (t.detach() for t in inputs(tree, 4, 2, torch.bfloat16))
    got = tree_attention(query, key, value, tree.segments, SCALE)
    assert got.dtype == torch.bfloat16
    want = dense_attention(query.double(), key.double(), value.double(), tree)
    torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)
