"""One order for what came in any: turns that an agent's calls recorded side by side, groups of a batch.

Sums of floating-point numbers depend on their order. What is trained must not depend on which of two
calls, or of two groups, was done first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from areal_agents.core.rollout import Episode, RolloutGroup
from areal_agents.core.trajectory import Turn


def ordered_groups(groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
    """By id, each with the turns of its episodes in `ordered_turns`."""
    return sorted(
        (
            replace(group, rollouts=tuple(replace(r, episode=_ordered(r.episode)) for r in group.rollouts))
            for group in groups
        ),
        key=lambda group: group.id,
    )


def ordered_turns(turns: Iterable[Turn]) -> list[Turn]:
    """Depth first, and siblings by their tokens: an order that follows from the turns alone.

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


def _ordered(episode: Episode) -> Episode:
    return replace(episode, turns=tuple(ordered_turns(episode.turns)))


def _content(turn: Turn) -> tuple[list[int], list[int], int]:
    drawn = turn.completion.token_ids.tolist()
    return turn.new_prompt_ids.tolist(), drawn, -1 if turn.sampling.seed is None else turn.sampling.seed
