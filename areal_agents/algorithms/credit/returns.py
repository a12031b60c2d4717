"""Which return a turn has earned, and which tokens are trained for it.

A reward counts once: a turn's own reward flows up to its ancestors along its branch only, so a
sub-agent's interleaved call never takes a share, and the episode reward is the same for every turn.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from areal_agents.core.rollout import Episode
from areal_agents.core.trajectory import Turn

Floats = npt.NDArray[np.float64]

_GREEDY_BELOW = 1e-5  # engines draw greedily there: vLLM below 1e-5, SGLang below 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeCredit:
    """The rewards of an episode on its forest of turns.

    Attributes:
        parents: per turn the index of the turn that it continues, -1 for a root; a parent comes first.
        rewards: [turns] each turn's own; a branch's is its leaf's.
        episode_reward: the episode's.
        group_id: the group whose baseline it shares.
    """

    parents: tuple[int, ...]
    rewards: Floats
    episode_reward: float
    group_id: str

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.rewards):
            raise ValueError(f"{len(self.parents)} turns with {len(self.rewards)} rewards")
        if not all(-1 <= parent < turn for turn, parent in enumerate(self.parents)):
            raise ValueError(f"a turn comes before its parent: {self.parents}")

    @property
    def score(self) -> float:
        """The sum of all rewards, each once."""
        return float(self.rewards.sum()) + self.episode_reward

    def children(self) -> list[list[int]]:
        """Per turn the indices of the turns that continue it."""
        following: list[list[int]] = [[] for _ in self.parents]
        for turn, parent in enumerate(self.parents):
            if parent >= 0:
                following[parent].append(turn)
        return following


def turn_returns(credit: EpisodeCredit, *, turn_discount: float = 1.0) -> Floats:
    """The return of every turn of an episode, [turns].

    With r_t the reward of turn t (a branch reward is its leaf's), C(t) the turns that continue t,
    γ the discount per turn and R the episode reward:

        b_t = r_t + γ · mean_{c in C(t)} b_c        return_t = b_t + R

    Source: the episode reward is GRPO's outcome reward (arXiv 2402.03300, section 4.1.2); the mean
    over continuations makes a fork an average over what followed, not a sum.
    """
    branch_returns = credit.rewards.astype(np.float64)
    for turn, following in reversed(list(enumerate(credit.children()))):
        if following:
            branch_returns[turn] += turn_discount * branch_returns[following].mean()
    return branch_returns + credit.episode_reward


def is_trained(
    turn: Turn,
    *,
    train_constrained: bool = False,
    train_greedy: bool = False,
    exclude_labels: Collection[str] = (),
) -> bool:
    """Whether the sampled tokens of a turn carry a gradient.

    A turn whose call was aborted, or whose client hung up, is not trained: the agent never saw it. Nor is
    one drawn at temperature 0, or so near to it that engines are greedy, where no sampling distribution
    exists, unless `train_greedy` says that the loss needs none. `exclude_labels` are patterns, so that
    "sub-agent/*" leaves out every sub-agent.
    """
    if turn.constrained and not train_constrained:
        return False
    if turn.discarded or turn.completion.finish_reason == "abort":
        return False
    if any(fnmatchcase(turn.label, pattern) for pattern in exclude_labels):
        return False
    return train_greedy or turn.sampling.temperature >= _GREEDY_BELOW


def owners(episode: Episode) -> dict[str, str]:
    """For every turn id, the id of the leaf that owns its tokens: the first leaf that it leads to.

    A turn that several leaves share is thereby trained exactly once.
    """
    owner: dict[str, str] = {}
    for leaf in episode.forest.leaves():
        for turn in episode.forest.path(leaf.id).turns:
            owner.setdefault(turn.id, leaf.id)
    return owner
