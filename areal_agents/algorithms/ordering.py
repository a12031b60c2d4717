"""Puts samples and groups into a fixed order that does not depend on when they arrived.

Sums of floating-point numbers depend on their order. The gradient must not depend on which of two concurrent
calls, or of two groups, finished first. Some kinds of credit depend on the recording order, so an episode
keeps its turns in that order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from areal_agents.core.rollout import RecordedEpisode, RolloutGroup
from areal_agents.core.trajectory import Trajectory, Turn


def ordered_groups(groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
    """The groups by id."""
    return sorted(groups, key=lambda group: group.id)


def ordered_turns(turns: Iterable[Turn]) -> list[Turn]:
    """The turns depth first, with siblings ordered by their tokens; the order depends only on the turns.

    A conversation without branches keeps the order in which it was recorded.
    """
    children: dict[str | None, list[Turn]] = defaultdict(list)
    for turn in turns:
        children[turn.parent].append(turn)
    ordered: list[Turn] = []
    left = sorted(children[None], key=_content, reverse=True)
    while left:
        turn = left.pop()
        ordered.append(turn)
        left += sorted(children[turn.id], key=_content, reverse=True)
    return ordered


def trajectories(episode: RecordedEpisode) -> list[Trajectory]:
    """The root-to-leaf paths of an episode, in an order that depends only on the turns."""
    turns = ordered_turns(episode.turns)
    by_id = {turn.id: turn for turn in turns}
    continued = {turn.parent for turn in turns}
    paths = []
    for leaf in turns:
        if leaf.id in continued:
            continue
        path = [leaf]
        while path[-1].parent is not None:
            path.append(by_id[path[-1].parent])
        paths.append(Trajectory(tuple(reversed(path))))
    return paths


def _content(turn: Turn) -> tuple[list[int], list[int], int]:
    sampled = turn.completion.token_ids.tolist()
    return turn.new_prompt_ids.tolist(), sampled, -1 if turn.sampling.seed is None else turn.sampling.seed
