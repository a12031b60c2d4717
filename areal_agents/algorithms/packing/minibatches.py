"""A batch cut into the K parts that one optimizer step each is made on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_agents.core.sample import TrainingSample


def split_minibatches(
    samples: Sequence[TrainingSample], count: int, *, seed: int
) -> list[list[TrainingSample]]:
    """Deal the samples to at most `count` parts of nearly equal size, none empty.

    Whole groups are dealt, in a random order that `seed` determines, so that a group's prefix is computed
    once; whole episodes are where there are fewer groups than parts.
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
