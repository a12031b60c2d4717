"""Group-relative advantages: how much better a return is than its baseline.

The statistics count each episode once, whatever the number of its turns and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.credit.returns import Returns
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats

NormLevel = Literal["group", "batch", "none"]
StdEstimator = Literal["sample", "population"]

STD_EPSILON = 1e-5
_EQUAL = 1e-9  # scores closer than this, relative to their size, count as equal


def all_equal(scores: npt.ArrayLike) -> bool:
    """Whether all scores [G] are equal up to rounding."""
    values = np.asarray(scores, np.float64)
    return bool(np.ptp(values) <= _EQUAL * max(1.0, float(np.abs(values).max())))


def differences(values: Floats, baselines: npt.ArrayLike) -> Floats:
    """Compute values − baselines elementwise, exactly 0 where the two are equal up to rounding.

    The mean of n equal numbers can differ from them in the last bit. A group is equal if all its advantages
    are 0, and such a remainder must not change that.
    """
    baselines = np.asarray(baselines, np.float64)
    size = np.maximum(1.0, np.maximum(np.abs(values), np.abs(baselines)))
    over = values - baselines
    return np.where(np.abs(over) <= _EQUAL * size, 0.0, over)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The returns of a group's turns and their baselines.

    Attributes:
        returns: per episode [T], D_i(k) of each turn.
        baselines: per episode [T], the baseline that is subtracted; 0 if no mean is subtracted.
        scale: the factor of the difference: 1/(std + 1e-5); 1 without a std; 0 if the scores that the std is
            computed from are all equal.
    """

    returns: tuple[Floats, ...]
    baselines: tuple[Floats, ...]
    scale: float

    def advantages(self) -> list[Floats]:
        """Per episode [T] (return − baseline) · scale, exactly 0 where the two are equal up to rounding."""
        return [differences(r, b) * self.scale for r, b in zip(self.returns, self.baselines, strict=True)]


def compare(
    groups: Sequence[Sequence[EpisodeRewards]],
    returns: Returns,
    *,
    mean: NormLevel = "group",
    std: NormLevel = "group",
    std_estimator: StdEstimator = "sample",
    leave_one_out: bool = False,
    reductions: Sequence[Sequence[float]] | None = None,
) -> list[Comparison]:
    """Compare each turn's return with its baseline: A = (D_i(k) − mean_j D_j(k)) / (std + 1e-5).

    k is the number of turns that were recorded when the turn's call began, and D_j(k) is the return of
    episode j after its first k turns. The baseline of a turn is therefore taken at the same k in every
    episode, and an episode that ended earlier contributes its episode reward.

    A group of one episode, such as a conversation recorded from users, has no other attempt at its task. In
    place of its own statistics it takes those of the batch.

    Args:
        groups: the episodes of each group.
        returns: D, see `returns.EpisodeCredit` and `returns.RewardToGo`.
        mean: the episodes over which the baseline is computed: those of the group, of the batch, or none.
        std: the same for the standard deviation of the scores.
        std_estimator: "sample" divides by n − 1, as torch.std does and as the measured recipes
            did; "population" by n.
        leave_one_out: the baseline is over the other episodes: (Σ_j D_j − D_i)/(n − 1).
        reductions: per group and episode the number subtracted from its D_j in baselines, and from its score:
            the mean over its tokens of their penalties.

    Returns:
        One comparison per group. All advantages are 0 where the scores that the std is taken over are all
        equal (the ratio would only amplify turn rewards by 1e5), and in a batch of one episode.

    Raises:
        ValueError: there are no groups, a group has no episodes, or a reward is not finite.

    Source: GRPO, arXiv 2402.03300 eq. 3; Dr.GRPO (arXiv 2503.20783) is std="none"; leave-one-out is
    RLOO, arXiv 2402.14740.
    """
    if not groups:
        raise ValueError("a batch must have at least one group, got none")
    for index, group in enumerate(groups):
        if not group:
            raise ValueError(f"group {index} of the batch must have at least one episode, got none")
        if not all(np.isfinite(member.score) for member in group):
            raise ValueError(f"group {index} of the batch must have finite rewards only")
    off = reductions or [[0.0] * len(group) for group in groups]
    batch = _Pool([m for group in groups for m in group], [o for of_group in off for o in of_group], returns)
    out, first = [], 0
    for group, of_group in zip(groups, off, strict=True):
        over_batch = (batch, first)
        over_group = (_Pool(group, of_group, returns), 0) if len(group) > 1 else over_batch
        pools = {"group": over_group, "batch": over_batch}
        first += len(group)
        scale = 1.0 if std == "none" else inverse_std(pools[std][0].scores, std_estimator)
        earned = tuple(returns.after(member, member.recorded_before) for member in group)
        if mean == "none":
            out.append(Comparison(earned, tuple(map(np.zeros_like, earned)), scale))
            continue
        pool, shift = pools[mean]
        leaves_out = leave_one_out and pool.size > 1
        baselines = tuple(
            pool.baselines(member.recorded_before, left_out=shift + place if leaves_out else None)
            for place, member in enumerate(group)
        )
        out.append(Comparison(earned, baselines, scale))
    return out


class _Pool:
    """The episodes over which a baseline is computed; returns are cached for each k."""

    def __init__(self, members: Sequence[EpisodeRewards], off: Sequence[float], returns: Returns) -> None:
        self._members, self._off, self._returns = members, np.asarray(off, np.float64), returns
        self._at: dict[int, Floats] = {}
        self.size = len(members)
        self.scores = np.array([member.score for member in members]) - self._off

    def baselines(self, before: Sequence[int], *, left_out: int | None) -> Floats:
        """Return [n], the mean of D_j(k) over the episodes, for each k in `before`.

        `left_out` is the index of an episode that does not count, or None.
        """
        missing = sorted(set(before) - self._at.keys())
        if missing:
            table = np.stack([self._returns.after(member, missing) for member in self._members])  # [n, k]
            self._at |= dict(zip(missing, (table - self._off[:, None]).T, strict=True))
        means = {}
        for k in set(before):
            values = self._at[k]
            if left_out is None:
                means[k] = float(values.mean())
            else:
                means[k] = float((values.sum() - values[left_out]) / (self.size - 1))
        return np.array([means[k] for k in before])


def step_advantages(
    groups: Sequence[Sequence[EpisodeRewards]],
    *,
    mean: NormLevel,
    std: NormLevel,
    std_estimator: StdEstimator,
) -> list[list[Floats]]:
    """Process supervision: the rewards of steps are normalised among all steps, then summed to go.

        r̃ = (r − mean)/(std + 1e-5)        A_t = Σ_{steps that end at turn t or later} r̃

    A step ends at each turn that has its own reward; the episode's reward, if there is one, is an additional
    step after the last turn. Steps are in recording order, and a turn counts the steps of the turns that were
    recorded after its call began.

    Args:
        mean, std: whether the statistic is computed over the steps of the group, over those of the batch, or
            not at all.

    Returns:
        Per group and episode an array [T]; all zero where the rewards that the std is computed from are
        equal.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.3.
    """
    steps = [[_steps(member) for member in group] for group in groups]
    batch = np.concatenate([np.empty(0), *(values for group in steps for values in group)])
    out = []
    for group, of_group in zip(groups, steps, strict=True):
        pools = {"group": np.concatenate([np.empty(0), *of_group]), "batch": batch}
        centre = 0.0 if mean == "none" else mean_of(pools[mean])
        scale = 1.0 if std == "none" else inverse_std(pools[std], std_estimator)
        advantages = []
        for member, values in zip(group, of_group, strict=True):
            normalised = differences(values, centre) * scale
            # [T + 1] the sum over the steps that end at turn k or later
            by_turn = np.zeros(len(member.turns) + 1)
            ends = np.flatnonzero(np.append(member.rewarded, member.has_episode_reward))
            by_turn[ends] = normalised
            to_go = by_turn[::-1].cumsum()[::-1]
            advantages.append(to_go[np.array(member.recorded_before, np.int64)])
        out.append(advantages)
    return out


def _steps(member: EpisodeRewards) -> Floats:
    own = member.turns[member.rewarded]
    return np.append(own, member.episode) if member.has_episode_reward else own


def whitened(
    advantages: Sequence[Floats],
    group_ids: Sequence[str],
    *,
    mean: NormLevel,
    std: NormLevel,
    std_estimator: StdEstimator,
) -> list[Floats]:
    """Normalise the advantages of single tokens: (A − mean)/(std + 1e-5), with statistics over tokens.

    Args:
        advantages: per sample an array [N_s] over its trained tokens.
        group_ids: the group id of each sample.
        mean, std: whether the statistic is computed over the tokens of the group, over those of the batch, or
            not at all.

    Source: the advantages of a critic are normalised over the batch's tokens since PPO (arXiv
    1707.06347); REINFORCE++ does so without a critic (arXiv 2501.03262).
    """
    pools = {"group": list(group_ids), "batch": [""] * len(group_ids)}
    centres = [0.0] * len(group_ids)
    scales = [1.0] * len(group_ids)
    if mean != "none":
        centres = _over_pools(advantages, pools[mean], mean_of)
    if std != "none":
        scales = _over_pools(advantages, pools[std], lambda values: inverse_std(values, std_estimator))
    return [(a - c) * s for a, c, s in zip(advantages, centres, scales, strict=True)]


def _over_pools(
    arrays: Sequence[Floats], pools: Sequence[str], statistic: Callable[[Floats], float]
) -> list[float]:
    """For each array, the statistic over all arrays with the same pool name."""
    members: dict[str, list[Floats]] = {}
    for array, pool in zip(arrays, pools, strict=True):
        members.setdefault(pool, []).append(array)
    found = {pool: statistic(np.concatenate(of_pool)) for pool, of_pool in members.items()}
    return [found[pool] for pool in pools]


def mean_of(values: Floats) -> float:
    """The mean; 0 if there are no values."""
    return float(values.mean()) if values.size else 0.0


def inverse_std(values: Floats, std_estimator: StdEstimator) -> float:
    """1/(std + 1e-5); 0 if all values are equal or there are none."""
    if not values.size or all_equal(values):
        return 0.0
    return float(1 / (values.std(ddof=1 if std_estimator == "sample" else 0) + STD_EPSILON))
