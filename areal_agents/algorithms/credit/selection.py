"""Chooses the recorded episodes that supervised training learns from.

Episodes are compared by their scores only within their group; no scale of the scores is assumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.credit.advantages import all_equal


def best_episodes(scores: npt.ArrayLike, *, min_score: float | None) -> list[int]:
    """The members of a group, by index, that SFT trains on.

    With `min_score`, these are the members with at least that score. Otherwise they are all members with the
    highest score; if a group has several members with equal scores, none is chosen, because they may be
    equally bad. The only member of a group is chosen as a demonstration.

    Source: rejection-sampled fine-tuning, arXiv 2308.01825, section 3.3.
    """
    values = np.asarray(scores, np.float64)
    if min_score is not None:
        return np.flatnonzero(values >= min_score).tolist()
    if len(values) > 1 and all_equal(values):
        return []
    return [index for index, value in enumerate(values) if all_equal([value, values.max()])]


def preference_pair(scores: npt.ArrayLike, *, usable: Sequence[bool]) -> tuple[int, int] | None:
    """The best and the worst member of a group, by index; None if no two usable scores differ.

    Args:
        scores: [G].
        usable: [G] whether the member has a token to train on.

    The first of several equal members is chosen, so that building a batch is deterministic.
    """
    values = np.asarray(scores, np.float64)
    members = [index for index, fit in enumerate(usable) if fit]
    if not members or all_equal(values[members]):
        return None
    return max(members, key=lambda i: values[i]), min(members, key=lambda i: values[i])
