"""The kernels of `logit_kernels`, in Triton. Only that module imports this one, where there is a GPU.

The compiler reads the annotations of parameters, so only constants have any.
"""

# mypy: disable-error-code="no-untyped-def,import-untyped,misc"

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)  # below any logit, and its difference from a logit does not overflow


@triton.jit
def statistics(
    logits,
    temperatures,
    targets,
    logprobs,
    entropies,
    normalizers,
    stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """Logprobs, entropies and logs of the normalizers [C] of logits [C, V], whose rows begin `stride` apart.

    Each program reads one row once. With scores s = logits / temperature it keeps the largest score m so far,
    z = Σ exp(s − m) and t = Σ exp(s − m) (s − m), and rescales z and t when m grows. Then H = log z − t/z.
    """
    row = tl.program_id(0)
    first = logits + row.to(tl.int64) * stride
    temperature = tl.load(temperatures + row)
    largest = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    moment = tl.full((), 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        scores = tl.load(first + columns, mask=inside, other=LOWEST) / temperature
        grown = tl.maximum(largest, tl.max(tl.where(inside, scores, LOWEST), 0))
        scale = tl.exp(largest - grown)
        shifted = tl.where(inside, scores - grown, 0.0)
        odds = tl.where(inside, tl.exp(shifted), 0.0)
        moment = scale * (moment + (largest - grown) * total) + tl.sum(odds * shifted, 0)
        total = scale * total + tl.sum(odds, 0)
        largest = grown
    log_total = tl.log(total)
    score = tl.load(first + tl.load(targets + row)) / temperature
    tl.store(logprobs + row, score - largest - log_total)
    tl.store(entropies + row, log_total - moment / total)
    tl.store(normalizers + row, log_total + largest)


@triton.jit
def gradient(
    logits,
    temperatures,
    targets,
    normalizers,
    entropies,
    of_logprobs,
    of_entropies,
    out,
    stride,
    vocabulary,
    OF_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient with respect to the scores [C, V], in the type of `out`: g (1_y − p) − e p (log p + H),
    with g of `of_logprobs` and e of `of_entropies`. Each program computes one block of a row."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    scores = tl.load(logits + row.to(tl.int64) * stride + columns, mask=inside, other=0.0)
    log_p = scores / tl.load(temperatures + row) - tl.load(normalizers + row)
    p = tl.exp(log_p)
    outer = tl.load(of_logprobs + row)
    found = tl.where(columns == tl.load(targets + row), outer, 0.0) - outer * p
    if OF_ENTROPIES:
        found -= tl.load(of_entropies + row) * p * (log_p + tl.load(entropies + row))
    to = out + row.to(tl.int64) * vocabulary + columns
    tl.store(to, found.to(out.dtype.element_ty), mask=inside)
