"""Which return a turn has earned, and which tokens are trained for it.

A reward counts once: a turn's own reward flows up to its ancestors along its branch only, so a
sub-agent's interleaved call never takes a share, and the episode reward is the same for every turn.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from areal_agents.core.rollout import Episode
from areal_agents.core.trajectory import Turn


def turn_returns(episode: Episode, *, turn_discount: float = 1.0) -> dict[str, float]:
    """The return of every turn of an episode, by turn id.

    With r_t the sum of the rewards of turn t (a branch reward is its leaf's), C(t) the turns that
    continue t, γ the discount per turn and R the episode reward:

        b_t = r_t + γ · mean_{c in C(t)} b_c        return_t = b_t + R

    Source: the episode reward is GRPO's outcome reward (arXiv 2402.03300, section 4.1.2); the mean
    over continuations makes a fork an average over what followed, not a sum.
    """
    own = dict.fromkeys((turn.id for turn in episode.turns), 0.0)
    episode_reward = 0.0
    for reward in episode.rewards:
        if reward.scope == "episode":
            episode_reward += reward.value
        else:
            own[reward.target] += reward.value
    below: dict[str, list[float]] = {}
    branch_returns: dict[str, float] = {}
    for turn in reversed(episode.forest.turns):  # a turn is recorded after its parent
        later = below.pop(turn.id, [])
        value = own[turn.id] + (turn_discount * sum(later) / len(later) if later else 0.0)
        branch_returns[turn.id] = value
        if turn.parent is not None:
            below.setdefault(turn.parent, []).append(value)
    return {turn.id: branch_returns[turn.id] + episode_reward for turn in episode.turns}


def is_trained(turn: Turn, *, train_constrained: bool = False, exclude_labels: Collection[str] = ()) -> bool:
    """Whether the sampled tokens of a turn carry a gradient.

    A turn whose call was aborted, or whose client hung up, is not trained: the agent never saw it. Nor is
    one drawn at temperature 0, where no sampling distribution exists. `exclude_labels` are patterns, so
    that "sub-agent/*" leaves out every sub-agent.
    """
    if turn.constrained and not train_constrained:
        return False
    if turn.discarded or turn.completion.finish_reason == "abort":
        return False
    if any(fnmatchcase(turn.label, pattern) for pattern in exclude_labels):
        return False
    return turn.sampling.temperature > 0


def owners(episode: Episode) -> dict[str, str]:
    """For every turn id, the id of the leaf that owns its tokens: the first leaf that it leads to.

    A turn that several leaves share is thereby trained exactly once.
    """
    owner: dict[str, str] = {}
    for leaf in episode.forest.leaves():
        for turn in episode.forest.path(leaf.id).turns:
            owner.setdefault(turn.id, leaf.id)
    return owner
