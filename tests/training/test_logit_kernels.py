"""Compares the logit kernels, interpreted and on a GPU, with formulas in float64, and compiles them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_agents.training.step import logit_kernels

VOCABULARY = 10_007  # not a multiple of the block size

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton comes with torch for Linux on x86-64"
)


def inputs(scale: float, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a few rows, their temperatures, and targets, of which one is the least likely token."""
    torch.manual_seed(0)
    logits = torch.randn(5, VOCABULARY) * scale
    targets = torch.randint(VOCABULARY, (5,))
    targets[0] = logits[0].argmin()
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.3, 0.9])
    return logits.to(device), temperatures.to(device), targets.to(device)


def exact(
    logits: Tensor, temperatures: Tensor, targets: Tensor, g: Tensor, e: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropies, logs of the normalizers and the gradient of g · logprobs + e · entropies."""
    scores = (logits.double() / temperatures.double()[:, None]).requires_grad_()
    log_p = torch.log_softmax(scores, -1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    loss = g.double() @ logprobs + (0 if e is None else e.double() @ entropies)
    (gradient,) = torch.autograd.grad(loss, scores)
    return logprobs.detach(), entropies.detach(), scores.detach().logsumexp(-1), gradient


def check(device: str, statistics: Callable[..., Any], gradient: Callable[..., Any]) -> None:
    none = [array[:0] for array in inputs(1.0, device)]
    assert [len(array) for array in statistics(*none)] == [0, 0, 0]
    empty = none[1]
    assert gradient(*none, empty, empty, empty, None, torch.float32).shape == (0, VOCABULARY)
    for scale in (1.0, 8.0, 30.0):
        given = inputs(scale, device)
        found = statistics(*given)
        g, outer = torch.randn(5, device=device), torch.randn(5, device=device)
        for e in (None, outer):
            *want, want_gradient = exact(*given, g, e)
            for one, other in zip(found, want, strict=True):
                assert float((one - other).abs().max()) < 2e-6 * (1 + float(other.abs().max()))
            _, entropies, normalizers = found
            got = gradient(*given, normalizers, entropies, g, e, torch.float32)
            assert float((got - want_gradient).abs().max()) < 3e-5
            half = gradient(*given, normalizers, entropies, g, e, torch.bfloat16)
            assert half.dtype == torch.bfloat16
            assert torch.allclose(half.float(), got, rtol=2**-7, atol=1e-30)


@needs_triton
def test_the_kernels_compute_the_formulas() -> None:
    """The kernels run in a separate process, because Triton selects its interpreter when it is imported."""
    done = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, text=True, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus(capability: int) -> None:
    """The compiler needs no GPU."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from areal_agents.training.step import triton_kernels

    target = GPUTarget("cuda", capability, 32)
    rows = dict.fromkeys(("logits", "temperatures", "normalizers", "entropies"), "*fp32") | {
        "targets": "*i64"
    }
    sizes = {"stride": "i32", "vocabulary": "i32", "BLOCK": "constexpr"}
    constants = {"BLOCK": logit_kernels.BLOCK}
    sources = [ASTSource(triton_kernels.statistics, rows | {"logprobs": "*fp32"} | sizes, constants)]
    for out in ("*bf16", "*fp16", "*fp32"):
        for of_entropies in (False, True):
            signature = {
                **rows, "of_logprobs": "*fp32", "of_entropies": "*fp32", "out": out, **sizes,
                "OF_ENTROPIES": "constexpr",
            }  # fmt: skip
            sources.append(
                ASTSource(triton_kernels.gradient, signature, constants | {"OF_ENTROPIES": of_entropies})
            )
    for source in sources:
        made = compiled(source, target=target, options={"num_warps": logit_kernels.WARPS})
        assert made.asm["cubin"]


def test_kernels_on_meta_tensors_return_arrays_for_the_memory_estimate() -> None:
    logits = torch.empty(7, 100, device="meta")
    row = torch.empty(7, device="meta")
    targets = torch.empty(7, dtype=torch.int64, device="meta")
    statistics = logit_kernels.token_statistics(logits, row, targets)
    assert [(array.shape, array.dtype) for array in statistics] == [((7,), torch.float32)] * 3
    gradient = logit_kernels.logit_gradient(logits, row, targets, row, row, row, None, torch.bfloat16)
    assert (gradient.shape, gradient.dtype) == ((7, 100), torch.bfloat16)
    total, half = torch.empty(100, 8, device="meta"), torch.bfloat16
    left, right = torch.empty(100, 7, device="meta", dtype=half), torch.empty(7, 8, device="meta", dtype=half)
    logit_kernels.add_half_product(total, left, right)


@pytest.mark.gpu
def test_the_kernels_compute_the_formulas_on_a_gpu() -> None:
    check("cuda", logit_kernels.token_statistics, logit_kernels.logit_gradient)


@pytest.mark.gpu
def test_a_product_is_added_in_float32_and_in_place() -> None:
    torch.manual_seed(0)
    left = torch.randn(1000, 400, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(400, 64, device="cuda", dtype=torch.bfloat16)
    total = torch.randn(1000, 64, device="cuda")
    want = total.double() + left.double() @ right.double()
    place = total.data_ptr()
    logit_kernels.add_half_product(total, left, right)
    assert total.data_ptr() == place
    logit_kernels.add_half_product(total, left[:, :0], right[:0])
    assert float((total - want).abs().max()) < 1e-4
    logit_kernels.add_half_product(total, left.T.contiguous().T, right)
    want += left.double() @ right.double()
    assert float((total - want).abs().max()) < 1e-4


if __name__ == "__main__":
    check("cpu", logit_kernels.compute_statistics, logit_kernels.compute_gradient)
