"""Packed tree attention against a dense float64 softmax over what each row may see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from training_support import make_sample

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.packing.token_tree import TokenTree, build_tree
from areal_agents.training.attention import gathered_attention, plan, tree_attention
from areal_agents.training.attention_gpu import flex_tree_attention, gpu_attention, gpu_plan, tree_block_mask

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


def long_tree() -> TokenTree:
    """Three levels over several blocks of 128 rows, and documents that share nothing."""
    rng = np.random.default_rng(1)
    root, middle = rng.integers(0, 9, 700), rng.integers(0, 9, 300)
    tails = [rng.integers(10, 99, n) for n in (40, 260, 1)]
    sequences = [np.concatenate([root, middle, tail]) for tail in tails]
    sequences += [np.concatenate([root, rng.integers(10, 99, 150)]), rng.integers(10, 99, 390)]
    return build_tree(sequences, min_saved=1)


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # compiled it is on a GPU only
@pytest.mark.parametrize(
    ("make", "heads", "groups"), [(make_tree, 4, 2), (long_tree, 4, 4), (long_tree, 4, 1)]
)
def test_flex_attention_sees_what_gathered_attention_sees(make, heads: int, groups: int) -> None:  # type: ignore[no-untyped-def]
    tree = make()
    query, key, value = (t.detach() for t in inputs(tree, heads, groups, torch.float32))
    mask = tree_block_mask(tree.segments, torch.device("cpu"))
    got = flex_tree_attention(query, key, value, mask, SCALE)
    want = gathered_attention(query, key, value, tree.segments, SCALE)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_blocks_that_see_all_and_nothing_are_found() -> None:
    tree = long_tree()
    mask = tree_block_mask(tree.segments, torch.device("cpu"))
    seen = torch.zeros(mask.shape[-2:], dtype=torch.bool)  # rows of padding too
    for rows in tree.rows:
        for position, row in enumerate(rows):
            seen[row, torch.from_numpy(rows[: position + 1])] = True
    padding = torch.arange(len(tree.token_ids), len(seen))
    seen[padding, padding] = True
    blocks = seen.reshape(len(seen) // 128, 128, -1, 128).transpose(1, 2)
    full = blocks.all(3).all(2)
    assert full.sum() > 20 and (~blocks.any(3).any(2)).sum() > 100
    for number, indices, want in (
        (mask.full_kv_num_blocks, mask.full_kv_indices, full),
        (mask.kv_num_blocks, mask.kv_indices, blocks.any(3).any(2) & ~full),
    ):
        got = torch.zeros_like(want)
        for row, (count, columns) in enumerate(zip(number[0, 0], indices[0, 0], strict=True)):
            got[row, columns[:count].long()] = True
        assert torch.equal(got, want)


def test_a_gpus_plan_takes_documents_apart_and_trees_whole() -> None:
    rng = np.random.default_rng(0)
    flat = build_tree([rng.integers(0, 9, n) for n in (5, 3, 9)], min_saved=None)
    made = gpu_plan(flat.segments, torch.device("cpu"))
    assert made.documents is not None and made.longest == 9
    assert made.documents.dtype == torch.int32 and made.documents[-1] == 17
    assert sorted(made.documents.diff().tolist()) == [3, 5, 9]
    assert gpu_plan(make_tree().segments, torch.device("cpu")).documents is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels of a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flat", [True, False])
def test_gpu_attention_and_its_gradients_equal_gathered_attention(flat: bool, dtype: torch.dtype) -> None:
    tree = long_tree()
    if flat:
        tree = build_tree([tree.token_ids[rows] for rows in tree.rows], min_saved=None)
    got_in = [t.detach().to("cuda", dtype).requires_grad_() for t in inputs(tree, 4, 2, torch.float32)]
    want_in = [t.detach().double().cpu().requires_grad_() for t in got_in]
    made = gpu_plan(tree.segments, torch.device("cuda"))
    assert (made.documents is not None) == flat
    got, want = gpu_attention(*got_in, made, SCALE), dense_attention(*want_in, tree)
    weights = torch.randn(want.shape, dtype=torch.float64)
    got_gradients = torch.autograd.grad(got, got_in, weights.to("cuda", dtype))
    want_gradients = torch.autograd.grad(want, want_in, weights)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in ((got, want), *zip(got_gradients, want_gradients, strict=True)):
        error = (one.double().cpu() - other).abs().max() / other.abs().max()
        assert error <= tolerance, float(error)


def test_segments_that_do_not_cover_the_rows_are_refused() -> None:
    tree = make_tree()
    (batch,) = pack([make_sample([1, 2, 3], [2], rng=np.random.default_rng(0))], token_budget=8)
    with pytest.raises(ValueError, match=f"segments of {len(tree.token_ids)} rows, and 2 rows on 1 ranks"):
        plan(replace(batch, segments=tree.segments))
