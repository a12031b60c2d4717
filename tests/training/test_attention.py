"""Packed tree attention equals a dense float64 softmax over the rows that each row may attend to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_support import make_sample

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.packing.token_tree import TokenTree, build_tree
from areal_agents.errors import TrainingError
from areal_agents.training.model import attention_gpu
from areal_agents.training.model.attention import ROWS, gathered_attention, plan, tree_attention
from areal_agents.training.model.attention_gpu import (
    GpuPlan,
    compiled_flex,
    flex_tree_attention,
    gpu_attention,
    gpu_plan,
    tree_block_mask,
)

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


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TokenTree,
    *,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the output [1, H, T, D]. Each row attends to the last `window` rows, up to itself, of every
    sequence that contains it; a sink [H] adds exp(sink) to the denominator of the softmax."""
    size = len(tree.token_ids)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for rows in tree.rows:
        for position, row in enumerate(rows):
            first = 0 if window is None else max(0, position - window + 1)
            seen[row, torch.from_numpy(rows[first : position + 1])] = True
    repeats = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = (query @ keys.transpose(2, 3) * SCALE).masked_fill(~seen, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, -1) @ values
    weights = scores.exp()
    return (weights / (weights.sum(-1, keepdim=True) + sinks.exp()[None, :, None, None])) @ values


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


@pytest.mark.parametrize("implementation", [tree_attention, gathered_attention])
@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 60, 1000])
def test_sinks_and_windows_equal_dense_attention(
    implementation, with_sinks: bool, window: int | None
) -> None:  # type: ignore[no-untyped-def]
    tree = make_tree()
    got_in, want_in = inputs(tree, 4, 2, torch.float32), inputs(tree, 4, 2, torch.float64)
    got_sinks = want_sinks = None
    if with_sinks:
        want_sinks = torch.tensor([-3.0, 0.5, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
        got_sinks = want_sinks.detach().float().requires_grad_()
        got_in, want_in = [*got_in, got_sinks], [*want_in, want_sinks]
    got = implementation(*got_in[:3], tree.segments, SCALE, sinks=got_sinks, window=window)
    want = dense_attention(*want_in[:3], tree, sinks=want_sinks, window=window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)
    weights = torch.randn(want.shape, dtype=torch.float64)
    got_gradients = torch.autograd.grad(got, got_in, weights.float())
    want_gradients = torch.autograd.grad(want, want_in, weights)
    for got_gradient, want_gradient in zip(got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(got_gradient.double(), want_gradient, atol=2e-5, rtol=1e-4)


def test_a_window_over_long_segments_is_computed_in_blocks_of_rows() -> None:
    tree = long_tree()
    assert max(s.end - s.start for s in tree.segments) > 2 * ROWS
    query, key, value = (t.detach() for t in inputs(tree, 2, 1, torch.float64))
    sinks = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for window, some in ((100, None), (300, sinks), (None, sinks)):
        got = gathered_attention(query, key, value, tree.segments, SCALE, sinks=some, window=window)
        want = dense_attention(query, key, value, tree, sinks=some, window=window)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_bfloat16_with_sinks_and_a_window_agrees_to_its_precision() -> None:
    tree = make_tree()
    query, key, value = (t.detach() for t in inputs(tree, 4, 2, torch.bfloat16))
    sinks = torch.tensor([-3.0, 0.5, 2.0, 6.0], dtype=torch.bfloat16)
    got = tree_attention(query, key, value, tree.segments, SCALE, sinks=sinks, window=20)
    assert got.dtype == torch.bfloat16
    wide = (query.double(), key.double(), value.double())
    want = dense_attention(*wide, tree, sinks=sinks.double(), window=20)
    torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


def test_bfloat16_takes_the_gathered_path_and_agrees_to_its_precision() -> None:
    tree = make_tree()
    query, key, value = (t.detach() for t in inputs(tree, 4, 2, torch.bfloat16))
    got = tree_attention(query, key, value, tree.segments, SCALE)
    assert got.dtype == torch.bfloat16
    want = dense_attention(query.double(), key.double(), value.double(), tree)
    torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


def long_tree() -> TokenTree:
    """Return a tree of three levels over several blocks of 128 rows, and a document that shares no prefix."""
    rng = np.random.default_rng(1)
    root, middle = rng.integers(0, 9, 700), rng.integers(0, 9, 300)
    tails = [rng.integers(10, 99, n) for n in (40, 260, 1)]
    sequences = [np.concatenate([root, middle, tail]) for tail in tails]
    sequences += [np.concatenate([root, rng.integers(10, 99, 150)]), rng.integers(10, 99, 390)]
    return build_tree(sequences, min_saved=1)


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # it is compiled only on a GPU
@pytest.mark.parametrize(
    ("make", "heads", "groups"), [(make_tree, 4, 2), (long_tree, 4, 4), (long_tree, 4, 1)]
)
def test_flex_attention_equals_gathered_attention(make, heads: int, groups: int) -> None:  # type: ignore[no-untyped-def]
    tree = make()
    query, key, value = (t.detach() for t in inputs(tree, heads, groups, torch.float32))
    mask = tree_block_mask(tree.segments, torch.device("cpu"))
    got = flex_tree_attention(query, key, value, mask, SCALE)
    want = gathered_attention(query, key, value, tree.segments, SCALE)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("with_sinks", "window"), [(True, None), (True, 300), (False, 40), (False, 300)])
def test_flex_attention_with_sinks_and_windows_equals_dense_attention(
    with_sinks: bool, window: int | None
) -> None:
    tree = long_tree()
    query, key, value = (t.detach() for t in inputs(tree, 4, 2, torch.float32))
    sinks = torch.tensor([-3.0, 0.5, 2.0, 6.0]) if with_sinks else None
    made = gpu_plan(tree.segments, torch.device("cpu"))
    got = gpu_attention(query, key, value, made, SCALE, sinks=sinks, window=window)
    want = dense_attention(
        query.double(), key.double(), value.double(), tree,
        sinks=None if sinks is None else sinks.double(), window=window,
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)
    assert made.block_mask(window) is made.block_mask(window) and set(made.block_masks) == {window}


@pytest.mark.parametrize("window", [None, 40, 128, 300, 5000])
def test_the_block_mask_finds_full_and_empty_blocks(window: int | None) -> None:
    tree = long_tree()
    mask = tree_block_mask(tree.segments, torch.device("cpu"), window=window)
    seen = torch.zeros(mask.shape[-2:], dtype=torch.bool)  # including rows of padding
    for rows in tree.rows:
        for position, row in enumerate(rows):
            first = 0 if window is None else max(0, position - window + 1)
            seen[row, torch.from_numpy(rows[first : position + 1])] = True
    padding = torch.arange(len(tree.token_ids), len(seen))
    seen[padding, padding] = True
    blocks = seen.reshape(len(seen) // 128, 128, -1, 128).transpose(1, 2)
    full = blocks.all(3).all(2)
    assert (~blocks.any(3).any(2)).sum() > 100 and (window is not None or full.sum() > 20)
    assert (full.sum() > 0) == (window is None or window > 255)
    found = []
    for number, indices in (
        (mask.full_kv_num_blocks, mask.full_kv_indices),
        (mask.kv_num_blocks, mask.kv_indices),
    ):
        got = torch.zeros_like(full)
        for row, (count, columns) in enumerate(zip(number[0, 0], indices[0, 0], strict=True)):
            got[row, columns[:count].long()] = True
        found.append(got)
    assert torch.equal(found[0], full)
    partial = blocks.any(3).any(2) & ~full
    assert (found[1] | ~partial).all() and not (found[1] & full).any()
    # the ends of a window are found by block, so a block at its edge may be listed although it is empty
    assert torch.equal(found[1], partial) if window is None else found[1].sum() <= 1.5 * partial.sum()


def test_a_gpu_plan_separates_documents_and_keeps_trees_whole() -> None:
    rng = np.random.default_rng(0)
    flat = build_tree([rng.integers(0, 9, n) for n in (5, 3, 9)], min_saved=None)
    made = gpu_plan(flat.segments, torch.device("cpu"))
    assert made.documents is not None and made.longest == 9
    assert made.documents.dtype == torch.int32 and made.documents[-1] == 17
    assert sorted(made.documents.diff().tolist()) == [3, 5, 9]
    assert gpu_plan(make_tree().segments, torch.device("cpu")).documents is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gpu_attention_and_its_gradients_equal_dense_attention(
    with_sinks: bool, window: int | None, flat: bool, dtype: torch.dtype
) -> None:
    tree = long_tree()
    if flat:
        tree = build_tree([tree.token_ids[rows] for rows in tree.rows], min_saved=None)
    got_in = [t.detach().to("cuda", dtype).requires_grad_() for t in inputs(tree, 4, 2, torch.float32)]
    want_in = [t.detach().double().cpu().requires_grad_() for t in got_in]
    made = gpu_plan(tree.segments, torch.device("cuda"))
    assert (made.documents is not None) == flat
    got_sinks = want_sinks = None
    if with_sinks:
        want_sinks = torch.tensor([-3.0, 0.5, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
        got_sinks = want_sinks.detach().to("cuda", dtype).requires_grad_()
    got = gpu_attention(*got_in, made, SCALE, sinks=got_sinks, window=window)
    want = dense_attention(*want_in, tree, sinks=want_sinks, window=window)
    if got_sinks is not None and want_sinks is not None:
        got_in, want_in = [*got_in, got_sinks], [*want_in, want_sinks]
    weights = torch.randn(want.shape, dtype=torch.float64)
    got_gradients = torch.autograd.grad(got, got_in, weights.to("cuda", dtype))
    want_gradients = torch.autograd.grad(want, want_in, weights)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in ((got, want), *zip(got_gradients, want_gradients, strict=True)):
        error = (one.double().cpu() - other).abs().max() / other.abs().max()
        assert error <= tolerance, float(error)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_heads_narrower_than_a_kernel_needs_are_padded() -> None:
    tree = long_tree()
    query, key, value = (t.detach()[..., :6] for t in inputs(tree, 4, 2, torch.float32))
    mask = tree_block_mask(tree.segments, torch.device("cpu"))
    widths = []

    def noting(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        widths.append((query.shape[3], key.shape[3], value.shape[3]))
        return flex_attention(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_gpu, "_uncompiled_flex", lambda: noting)
        got = flex_tree_attention(query, key, value, mask, SCALE)
    assert widths == [(16, 16, 16)]
    want = gathered_attention(query, key, value, tree.segments, SCALE)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_flash_attention_is_used_for_the_widths_and_types_that_it_supports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(attention_gpu, "varlen_attention", lambda *a, **k: taken.append("flash"))
    monkeypatch.setattr(attention_gpu, "flex_tree_attention", lambda *a, **k: taken.append("flex"))
    flat = gpu_plan(build_tree([np.arange(5), np.arange(3)], min_saved=None).segments, torch.device("cpu"))
    tree = gpu_plan(make_tree().segments, torch.device("cpu"))

    def kernel(plan: GpuPlan, width: int, dtype: torch.dtype, value: int = 0, **more: Any) -> str:
        query, key = torch.zeros(1, 4, 8, width, dtype=dtype), torch.zeros(1, 2, 8, width, dtype=dtype)
        gpu_attention(query, key, torch.zeros(1, 2, 8, value or width, dtype=dtype), plan, SCALE, **more)
        return taken.pop()

    assert kernel(flat, 128, torch.bfloat16) == kernel(flat, 256, torch.float16) == "flash"
    assert kernel(flat, 8, torch.bfloat16, window=3) == "flash"
    for width in (4, 100, 264):  # not a multiple of 8, or too wide
        assert kernel(flat, width, torch.bfloat16) == "flex"
    assert kernel(flat, 128, torch.float32) == kernel(tree, 128, torch.bfloat16) == "flex"
    assert kernel(flat, 192, torch.bfloat16, value=128) == "flex"
    assert kernel(flat, 128, torch.bfloat16, sinks=torch.zeros(4)) == "flex"


@pytest.mark.parametrize("shares_heads", [False, True])
def test_flash_attention_is_called_as_each_version_of_torch_declares_it(
    shares_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 has no argument `enable_gqa`; its kernel infers shared heads from the numbers of heads."""
    from torch.nn.attention import varlen

    calls: list[dict[str, Any]] = []

    def of_2_11(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        calls.append({"window_size": window_size, "longest": (max_q, max_k), "documents": cu_seq_q.tolist()})
        return query * scale

    def of_2_13(*given: Any, enable_gqa: bool = False, **named: Any) -> Tensor:
        assert enable_gqa
        return of_2_11(*given, **named)

    monkeypatch.setattr(varlen, "varlen_attn", of_2_13 if shares_heads else of_2_11)
    flat = build_tree([np.arange(5), np.arange(3)], min_saved=None)
    query, key, value = (t.detach().bfloat16() for t in inputs(flat, 4, 2, torch.float32))
    made = gpu_plan(flat.segments, torch.device("cpu"))
    for window in (None, 3):
        got = gpu_attention(query, key, value, made, 2.0, window=window)
        torch.testing.assert_close(got, query * 2.0)
    whole = {"longest": (5, 5), "documents": [0, 3, 8]}
    assert calls == [{"window_size": (-1, 0), **whole}, {"window_size": (2, 0), **whole}]


def test_a_few_compiled_programs_serve_all_batches_windows_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends if it exceeds dynamo's limit of 8 compiled programs for each function."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = compiled_flex.__wrapped__(counter)
    monkeypatch.setattr(attention_gpu, "_uncompiled_flex", lambda: compiled)
    rng = np.random.default_rng(0)
    for length in (100, 900):
        root = rng.integers(0, 9, length)
        sequences = [np.concatenate([root, rng.integers(10, 99, length // 4 + i)]) for i in range(2)]
        tree = build_tree(sequences, min_saved=1)
        query, key, value = (t.detach() for t in inputs(tree, 2, 1, torch.float32))
        made = gpu_plan(tree.segments, torch.device("cpu"))
        for window in (None, 40):
            for gradient in (True, False):
                with torch.set_grad_enabled(gradient):
                    flex_tree_attention(query, key, value, made.block_mask(window), SCALE)
    assert 0 < counter.frame_count <= 2
    torch._dynamo.reset()


def test_a_kernel_that_cannot_be_compiled_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo

    def failing(module: Any, inputs: Any) -> Any:
        raise NotImplementedError("no kernel for this GPU")

    torch._dynamo.reset()
    monkeypatch.setattr(attention_gpu, "_uncompiled_flex", lambda: compiled_flex.__wrapped__(failing))
    tree = long_tree()
    query, key, value = (t.detach() for t in inputs(tree, 4, 2, torch.float32))
    with pytest.raises(TrainingError, match=r"share_prefixes: false(.|\n)*no kernel for this GPU"):
        flex_tree_attention(query, key, value, tree_block_mask(tree.segments, torch.device("cpu")), SCALE)
    torch._dynamo.reset()


def test_segments_that_do_not_cover_the_rows_are_refused() -> None:
    tree = make_tree()
    (batch,) = pack([make_sample([1, 2, 3], [2], rng=np.random.default_rng(0))], token_budget=8)
    with pytest.raises(ValueError, match=f"cover {len(tree.token_ids)} rows, expected 1 × 2 "):
        plan(replace(batch, segments=tree.segments))
