"""Cuts sampled examples into batches for imitation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from warmup.transcripts import Example


def endless_batches(
    sample_pool: Callable[[], list[Example]], rng: random.Random, *, size: int, by_length: bool = True
) -> Iterator[list[Example]]:
    """Yield batches of `size` examples without end: each pool is cut into batches, which `rng` shuffles.

    Args:
        sample_pool: returns new examples, whose number is a multiple of `size`.
        by_length: a batch has examples of similar length, which saves padding. The loss is the mean over the
            tokens of a batch, so short examples then weigh more.

    Raises:
        ValueError: a pool is empty, or the number of its examples is not a multiple of `size`.
    """
    while True:
        pool = sample_pool()
        if not pool or len(pool) % size:
            raise ValueError(f"a pool of {len(pool)} examples cannot be cut into batches of {size}")
        if by_length:
            pool.sort(key=lambda example: len(example.ids))
        batches = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(batches)
        yield from batches
