"""Cuts what is drawn for imitation into batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from warmup.transcripts import Example


def endless_batches(
    draw_pool: Callable[[], list[Example]], rng: random.Random, *, size: int, by_length: bool = True
) -> Iterator[list[Example]]:
    """Endless batches of `size` examples: each pool that is drawn is cut into batches, which `rng` shuffles.

    Args:
        draw_pool: draws new examples, a multiple of `size`.
        by_length: a batch has examples of similar length, which saves padding. The loss is the mean over the
            tokens of a batch, so short examples then weigh more.
    """
    while True:
        pool = draw_pool()
        if by_length:
            pool.sort(key=lambda example: len(example.ids))
        batches = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(batches)
        yield from batches
