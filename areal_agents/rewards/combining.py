"""Makes reward functions of reward functions: weighted sums, gates, bounds, rewards of turns.

Each takes and returns functions of a `FinishedEpisode`, which may be async; what it returns is async.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from areal_agents.rewards.finished import FinishedEpisode

T = TypeVar("T")
Score = Callable[[FinishedEpisode], float | Awaitable[float]]
Messages = Sequence[Mapping[str, Any]]


def weighted(
    weights: Mapping[str, float], /, **scores: Score
) -> Callable[[FinishedEpisode], Awaitable[dict[str, float]]]:
    """Return a function that gives a reward of each name, its score times its weight.

        score = weighted({"correct": 1.0, "format": 0.2}, correct=is_correct, format=has_format)

    The score of the episode is their sum, and the metrics show each.

    Raises ValueError if the names of weights and scores differ.
    """
    if weights.keys() != scores.keys() or not scores:
        raise ValueError(f"weights and scores must have the same names, got {[*weights]} and {[*scores]}")

    async def score(episode: FinishedEpisode) -> dict[str, float]:
        return {name: weights[name] * float(await called(one, episode)) for name, one in scores.items()}

    return score


def gated(
    gate: Score, score: Score, *, otherwise: float = 0.0
) -> Callable[[FinishedEpisode], Awaitable[float]]:
    """Return a function that gives `score` where `gate` is above 0, else `otherwise`, without calling it."""

    async def gated_score(episode: FinishedEpisode) -> float:
        if await called(gate, episode) <= 0:
            return otherwise
        return float(await called(score, episode))

    return gated_score


def clipped(score: Score, low: float, high: float) -> Callable[[FinishedEpisode], Awaitable[float]]:
    """Return a function that gives `score` within bounds. Raises ValueError unless `low` <= `high`."""
    if not low <= high:
        raise ValueError(f"low must be at most high, got {low} and {high}")

    async def clipped_score(episode: FinishedEpisode) -> float:
        return min(high, max(low, float(await called(score, episode))))

    return clipped_score


def per_turn(
    score: Callable[[Messages, Mapping[str, Any]], float | Awaitable[float]],
) -> Callable[[FinishedEpisode], Awaitable[dict[str, float]]]:
    """Return a function that rewards each turn of an episode, of all conversations.

    Args:
        score: a function of the messages before a reply, and of the reply.
    """

    async def of_turns(episode: FinishedEpisode) -> dict[str, float]:
        rewards: dict[str, float] = {}
        for messages, ids in zip(episode.branches, _completions(episode), strict=True):
            for place, completion in _sampled(ids):
                if completion not in rewards:  # conversations may share their first turns
                    value = score(messages[:place], messages[place])
                    rewards[completion] = float(await _awaited(value))
        return rewards

    return of_turns


def potential(
    phi: Callable[[Messages], float | Awaitable[float]],
    outcome: Score | None = None,
    *,
    discount: float = 1.0,
) -> Callable[[FinishedEpisode], Awaitable[dict[str, float]]]:
    """Return a function that rewards the turns of the last conversation by potential-based shaping.

    A turn gets discount · Φ(s') - Φ(s) (Ng, Harada and Russell 1999, eq. 2), where s are the messages before
    its reply, s' those before the next one, and Φ is 0 at the end, so that which policy is best does not
    change. The last turn gets the reward of the outcome too.

    Args:
        phi: the potential of a conversation: how much of the task it has done.
        outcome: the reward of the episode.
        discount: that of the algorithm's credit, `algorithm.turn_discount`.
    """

    async def shaped(episode: FinishedEpisode) -> dict[str, float]:
        messages, ids = episode.messages, _completions(episode)
        turns = _sampled(ids[-1]) if ids else []
        if not turns:
            return {}
        before = [float(await _awaited(phi(messages[:place]))) for place, _ in turns]
        rewards = {
            completion: discount * later - now
            for (_, completion), now, later in zip(turns, before, [*before[1:], 0.0], strict=True)
        }
        if outcome is not None:
            rewards[turns[-1][1]] += float(await called(outcome, episode))
        return rewards

    return shaped


async def called(score: Score, episode: FinishedEpisode) -> float:
    """Return the finite score of an episode. Raises ValueError if it is none."""
    value = float(await _awaited(score(episode)))
    if not math.isfinite(value):
        name = getattr(score, "__name__", str(score))
        raise ValueError(f"the score of {name} must be finite, got {value}")
    return value


async def _awaited(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value


def _completions(episode: FinishedEpisode) -> Sequence[Sequence[str | None]]:
    if len(episode.completions) != len(episode.branches):
        raise ValueError("turns can be rewarded only in episodes that a proxy has recorded")
    return episode.completions


def _sampled(completions: Sequence[str | None]) -> list[tuple[int, str]]:
    """Return (place, completion id) of the messages that the policy sampled."""
    return [(place, one) for place, one in enumerate(completions) if one is not None]
