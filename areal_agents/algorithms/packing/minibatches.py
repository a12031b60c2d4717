"""Splits a batch into K minibatches, one for each optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_agents.core.sample import TrainingSample


def split_minibatches(
    samples: Sequence[TrainingSample], count: int, *, seed: int
) -> list[list[TrainingSample]]:
    """Distribute the samples over at most `count` non-empty parts with nearly the same number of groups.

    A group stays in one part, so that its prefix is computed once; if there are fewer groups than parts, only
    each episode stays in one part. `seed` determines the random order.
    """
    if count == 1 or len(samples) <= 1:
        return [list(samples)] if samples else []
    by_group: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append(sample)
    by_episode: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        by_episode.setdefault(sample.episode_id, []).append(sample)
    units = list((by_group if len(by_group) >= count else by_episode).values())
    parts: list[list[TrainingSample]] = [[] for _ in range(min(count, len(units)))]
    for place, index in enumerate(np.random.default_rng(seed).permutation(len(units))):
        parts[place % len(parts)] += units[index]
    return parts
