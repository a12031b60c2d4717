"""Attention and the output layer: their results against dense computations in float64, and their speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal_agents.algorithms.packing.token_tree import TokenTree, build_tree
from areal_agents.training.model.attention_gpu import gpu_attention, gpu_plan
from areal_agents.training.step.logprobs import token_logprobs
from benchmarks.gpu.parts import Here

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-4}  # of the largest value
HEADS, KV_HEADS, WIDTH = 16, 8, 128


def attention(here: Here) -> dict[str, Any]:
    """Flash attention and FlexAttention against dense masks, and their time for long documents and trees."""
    figures: dict[str, Any] = {}
    on_gpu = here.device == "cuda"
    for name, shared in (("documents", False), ("tree", True)):
        tree = _tree(here.scale.checked_rows, shared=shared)
        for dtype in TOLERANCE if on_gpu else (torch.float32,):
            for window in (None, 100):
                error = _error_against_dense(tree, here.device, dtype, window)
                key = f"error_{name}_{str(dtype).removeprefix('torch.')}"
                figures[key] = max(figures.get(key, 0.0), float(f"{error:.1e}"))
                if not error <= TOLERANCE[dtype]:
                    raise AssertionError(
                        f"{name}, {dtype}, window {window}: attention differs from dense masks by "
                        f"{error:.2e} of the largest value, expected at most {TOLERANCE[dtype]:.0e}"
                    )
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for name, shared in (("documents", False), ("tree", True)):
        tree = _tree(here.scale.rows, shared=shared)
        seconds = _attention_seconds(tree, here, dtype)
        pairs = sum(segment.pairs for segment in tree.segments)
        # 2 products forward and 5 backward, of 2 operations each
        flops = 7 * 2 * pairs * HEADS * WIDTH
        figures[f"{name}_ms"] = round(seconds * 1e3, 2)
        figures[f"{name}_tflops"] = round(flops / seconds / 1e12, 3)
    return figures


def head(here: Here) -> dict[str, Any]:
    """Logprobs and gradients of a bfloat16 output layer against float64, and their time."""
    shape, on_gpu = here.scale.shape, here.device == "cuda"
    torch.manual_seed(0)
    rows = here.scale.tokens
    layer = nn.Linear(shape.hidden, shape.vocab, bias=False, device=here.device, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.normal_(0.0, 4.0 / shape.hidden**0.5)
    hidden = torch.randn(rows, shape.hidden, device=here.device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(shape.vocab, (rows,), device=here.device)
    temperatures = torch.ones(rows, device=here.device)

    def once() -> Tensor:
        layer.weight.grad = hidden.grad = None
        logprobs, _ = token_logprobs(hidden, targets, temperatures, layer)
        logprobs.sum().backward()
        return logprobs.detach()

    got = once()[:256].double()
    exact = torch.log_softmax(hidden[:256].double() @ layer.weight.double().T, -1)
    error = float((got - exact.gather(1, targets[:256, None])[:, 0]).abs().max())
    if not error < 1e-3:
        raise AssertionError(f"logprobs of a bfloat16 head are off by {error:.1e}, expected less than 1e-3")
    seconds = best_seconds(once, here.scale.repeats, on_gpu=on_gpu)
    return {
        "logprob_error": float(f"{error:.1e}"),
        "forward_and_backward_ms": round(seconds * 1e3, 2),
        "tokens_per_s": round(rows / seconds),
    }


def best_seconds(call: Callable[[], object], repeats: int, *, on_gpu: bool) -> float:
    """The best time of a call that has run before."""
    best = float("inf")
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def _tree(rows: int, *, shared: bool) -> TokenTree:
    """Four sequences over about `rows` rows, which share half of them or nothing."""
    rng = np.random.default_rng(0)
    length = rows // (5 if shared else 4)
    prefix = rng.integers(0, 9, length if shared else 0)
    sequences = [np.concatenate([prefix, rng.integers(10 + 9 * i, 19 + 9 * i, length)]) for i in range(4)]
    return build_tree(sequences, min_saved=1 if shared else None)


def _inputs(rows: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(1, heads, rows, WIDTH, device=device).to(dtype).requires_grad_()

    return random(HEADS), random(KV_HEADS), random(KV_HEADS)


def _attention_seconds(tree: TokenTree, here: Here, dtype: torch.dtype) -> float:
    on_gpu = here.device == "cuda"
    inputs = _inputs(len(tree.token_ids), here.device, dtype)
    plan = gpu_plan(tree.segments, torch.device(here.device))
    weights = torch.randn_like(inputs[0])

    def once() -> None:
        with torch.set_grad_enabled(on_gpu):  # FlexAttention has no backward pass on a CPU
            out = gpu_attention(*inputs, plan, WIDTH**-0.5)
        if on_gpu:
            torch.autograd.grad(out, inputs, weights)

    once()
    return best_seconds(once, here.scale.repeats, on_gpu=on_gpu)


def _error_against_dense(tree: TokenTree, device: str, dtype: torch.dtype, window: int | None) -> float:
    """The largest difference of outputs and gradients, as a share of the largest value."""
    got_in = _inputs(len(tree.token_ids), device, dtype)
    query, key, value = want_in = [tensor.detach().double().requires_grad_() for tensor in got_in]
    plan = gpu_plan(tree.segments, torch.device(device))
    want = _dense(query, key, value, tree, window)
    weights = torch.randn_like(want)
    with torch.set_grad_enabled(device == "cuda"):
        got = gpu_attention(*got_in, plan, WIDTH**-0.5, window=window)
    pairs = [(got.detach(), want.detach())]
    if device == "cuda":
        gradients = torch.autograd.grad(got, got_in, weights.to(dtype))
        pairs += zip(gradients, torch.autograd.grad(want, want_in, weights), strict=True)
    return max(float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs)


def _dense(query: Tensor, key: Tensor, value: Tensor, tree: TokenTree, window: int | None) -> Tensor:
    """Attention by the definition: every row sees the rows of its sequence before it, within the window."""
    rows = len(tree.token_ids)
    seen = torch.zeros(rows, rows, dtype=torch.bool)
    for sequence in tree.rows:
        index = torch.from_numpy(sequence)
        mask = torch.ones(len(index), len(index), dtype=torch.bool).tril()
        seen[index[:, None], index] |= mask if window is None else mask.triu(1 - window)
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3)) * WIDTH**-0.5
    return torch.softmax(scores.masked_fill(~seen.to(query.device), -torch.inf), -1) @ value
