"""Logprobs and entropies of chosen tokens, without logits where no loss is.

Only the hidden rows that predict a trained token meet the output matrix, in chunks; when there is
more than one chunk each is recomputed in the backward pass, so that no more than one chunk of
logits [C, V] lives at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**25  # elements of one chunk of logits, 128 MiB in float32


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden)/temperature) at the targets, and the entropy of that distribution.

    Args:
        hidden: [N, d]; targets: [N]; temperatures: [N], each > 0.
        head: [C, d] → [C, V] logits.
        chunk_logits: bound on C · V.

    Returns:
        Logprobs [N] float32, differentiable; entropies [N] float32, detached.
    """
    rows = max(1, chunk_logits // vocab_size)
    if len(hidden) <= rows:
        return _chunk(hidden, targets, temperatures, head)
    chunks = zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
    parts = [checkpoint(_chunk, *chunk, head, use_reentrant=False) for chunk in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: Tensor, targets: Tensor, temperatures: Tensor, head: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperatures[:, None]
    all_logprobs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return -torch.nn.functional.nll_loss(all_logprobs, targets, reduction="none"), entropies
