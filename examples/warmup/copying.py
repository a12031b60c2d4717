"""Stage A: learn to copy, on random tokens.

The second half of a sequence repeats the six-token spans of its first half in another order; after the
first token of a span the rest is determined. A model that has not learnt this never learns to put a name
into a tool call, so the stage ends only when it is passed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from warmup.network import Network
from warmup.optim import Optimizers, Rates

LENGTHS = (12, 24, 48, 96, 192)
SPAN = 6
TOKENS_PER_STEP = 3072


def copy_batch(
    length: int, *, first_token: int, vocab_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Token ids [B, length] and the mask [B, length] of the tokens that can be copied; B fills a step."""
    if length % (2 * SPAN):
        raise ValueError(f"length must be a multiple of {2 * SPAN}, got {length}")
    batch = TOKENS_PER_STEP // length
    spans = torch.randint(first_token, vocab_size, (batch, length // 2 // SPAN, SPAN), generator=generator)
    order = torch.rand(spans.shape[:2], generator=generator).argsort(dim=1)
    repeated = spans.gather(1, order[:, :, None].expand_as(spans))
    ids = torch.cat([spans.flatten(1), repeated.flatten(1)], dim=1)
    copied = torch.zeros(batch, length, dtype=torch.bool)
    copied[:, length // 2 :] = True
    copied[:, length // 2 :: SPAN] = False  # which span comes next is random
    return ids, copied


def train_copying(
    network: Network,
    *,
    first_token: int,
    seed: int,
    report: Callable[[str], None],
    advance_at: float = 0.6,
    pass_at: float = 0.97,
    max_steps: int = 3000,
) -> None:
    """Train until five successive batches of the longest length reach `pass_at` accuracy.

    Raises RuntimeError if that has not happened after `max_steps`: what follows would be wasted.
    """
    generator = torch.Generator().manual_seed(seed)
    level, streak, settling = 0, 0, 0

    def scale(step: int) -> float:
        # At full rate the accuracy hovers just below the bar; at the last length the rate comes down.
        return min(1.0, (step + 1) / 20) * max(0.2, 1.0 - settling / 250)

    optimizers = Optimizers(network, Rates(muon=0.02, adam=3e-3), scale=scale)
    for step in range(1, max_steps + 1):
        ids, copied = copy_batch(
            LENGTHS[level], first_token=first_token, vocab_size=network.shape.vocab_size, generator=generator
        )
        wanted = copied[:, 1:]
        logits = network.logits(network(ids[:, :-1])[wanted])
        targets = ids[:, 1:][wanted]
        F.cross_entropy(logits, targets).backward()
        optimizers.step()
        accuracy = (logits.argmax(-1) == targets).float().mean().item()
        last = level == len(LENGTHS) - 1
        settling += last
        streak = streak + 1 if accuracy >= (pass_at if last else advance_at) else 0
        if step % 50 == 0:
            report(f"copying: step {step}, length {LENGTHS[level]}, accuracy {accuracy:.3f}")
        if last and streak == 5:
            report(f"copying: passed at step {step} with accuracy {accuracy:.3f}")
            return
        if not last and streak == 3:
            level, streak = level + 1, 0
    raise RuntimeError(f"copying: accuracy {accuracy:.3f} after {max_steps} steps, {pass_at} was required")
