"""GDPO: advantages from several named rewards, each normalised separately."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from areal_agents.algorithms.credit.advantages import StdEstimator, all_equal, differences, inverse_std
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats
from areal_agents.errors import TrainingError


def gdpo_advantages(
    groups: Sequence[Sequence[EpisodeRewards]],
    *,
    weights: Mapping[str, float],
    normalize_batch: bool,
    std_estimator: StdEstimator,
) -> list[list[Floats]]:
    """Each reward name is normalised within its group; the weighted sum of all is normalised over the batch.

        A_n,i = (r_n,i − mean_j r_n,j)/(std_j r_n,j + 1e-5)        over the episodes j of the group
        S_i   = Σ_n w_n · A_n,i
        A_i   = (S_i − mean S)/(std S + 1e-5)                      over all episodes of the batch

    r_n,i is the sum of the rewards with the name n of episode i, whatever their scope, and 0 for an episode
    without any. A name whose sums are equal in the whole group counts 0 there.

    Args:
        weights: w by name; empty means 1 for every name. Otherwise every name needs a weight.
        normalize_batch: False leaves A_i = S_i.

    Returns:
        Per group and episode an array [T], the advantage of the episode; exactly 0 for all episodes of a
        group in which all S_i are 0, since the mean over the batch is 0 too.

    Raises:
        TrainingError: `weights` is not empty and lacks a reward name; the message names all of them.

    Source: GDPO, arXiv 2601.05242.
    """
    refuse_unweighted(groups, weights)
    sums = []
    for group in groups:
        total = np.zeros(len(group))
        for name in sorted({name for member in group for name in member.by_name}):
            values = np.array([member.by_name.get(name, 0.0) for member in group])
            if all_equal(values):
                continue
            normalised = (values - values.mean()) * inverse_std(values, std_estimator)
            total += weights.get(name, 1.0) * normalised
        sums.append(differences(total, 0.0))
    if normalize_batch:
        batch = np.concatenate(sums)
        scale = inverse_std(batch, std_estimator)
        sums = [differences(of_group, batch.mean()) * scale for of_group in sums]
    return [
        [np.full(len(member.turns), value) for member, value in zip(group, of_group.tolist(), strict=True)]
        for group, of_group in zip(groups, sums, strict=True)
    ]


def refuse_unweighted(groups: Sequence[Sequence[EpisodeRewards]], weights: Mapping[str, float]) -> None:
    """Raise TrainingError, which names all reward names without a weight, if there is one."""
    of_groups: dict[str, str] = {}
    for group in groups:
        for name in sorted({name for member in group for name in member.by_name}):
            if weights and name not in weights:
                of_groups.setdefault(name, group[0].group_id)
    faults = []
    for name, group_id in of_groups.items():
        near = difflib.get_close_matches(name, weights, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        faults.append(f"group {group_id} has the reward {name!r}, which has no weight{hint}")
    if faults:
        known = ", ".join(sorted(weights))
        raise TrainingError(
            f"{'. '.join(faults)}. algorithm.reward_weights has {known}: add the others, with 0 to leave one "
            "out"
        )
