"""Combines reward functions into others: weighted sums, gates, bounds, rewards of turns.

Reward functions take a `FinishedEpisode`. Those that are given may be async; those that are returned are.
A synchronous function runs in a thread of its own, so that other episodes go on and `reward.time_s` holds.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from areal_agents.rewards.finished import FinishedEpisode
from areal_agents.rewards.own_thread import result_of

Score = Callable[[FinishedEpisode], float | Awaitable[float]]
Messages = Sequence[Mapping[str, Any]]


def weighted(
    weights: Mapping[str, float], /, **scores: Score
) -> Callable[[FinishedEpisode], Awaitable[dict[str, float]]]:
    """Return a function that gives one reward for each name: the score of this name times its weight.

        score = weighted({"correct": 1.0, "format": 0.2}, correct=is_correct, format=has_format)

    The score of the episode is their sum, and the metrics show each of them.

    Raises ValueError if the names of weights and scores differ.
    """
    if weights.keys() != scores.keys() or not scores:
        raise ValueError(f"weights and scores must have the same names, got {[*weights]} and {[*scores]}")

    async def score(episode: FinishedEpisode) -> dict[str, float]:
        return {name: weights[name] * await _score_of(one, episode) for name, one in scores.items()}

    return score


def gated(
    gate: Score, score: Score, *, otherwise: float = 0.0
) -> Callable[[FinishedEpisode], Awaitable[float]]:
    """Return a function that gives `score` if `gate` is above 0, else `otherwise` without calling `score`."""

    async def gated_score(episode: FinishedEpisode) -> float:
        if await _score_of(gate, episode) <= 0:
            return otherwise
        return await _score_of(score, episode)

    return gated_score


def clipped(score: Score, low: float, high: float) -> Callable[[FinishedEpisode], Awaitable[float]]:
    """Return a function that gives `score` within bounds. Raises ValueError unless `low` <= `high`."""
    if not low <= high:
        raise ValueError(f"low must be at most high, got {low} and {high}")

    async def clipped_score(episode: FinishedEpisode) -> float:
        return min(high, max(low, await _score_of(score, episode)))

    return clipped_score


def per_turn(
    score: Callable[[Messages, Mapping[str, Any]], float | Awaitable[float]],
) -> Callable[[FinishedEpisode], Awaitable[dict[str, float]]]:
    """Return a function that rewards each turn of an episode, in all its conversations.

    Args:
        score: called with the messages before a reply, and with the reply.

    The returned function raises ValueError for an episode that no proxy recorded.
    """

    async def of_turns(episode: FinishedEpisode) -> dict[str, float]:
        rewards: dict[str, float] = {}
        for messages, ids in zip(episode.branches, _completions(episode), strict=True):
            for place, completion in _sampled(ids):
                if completion not in rewards:  # conversations may share their first turns
                    rewards[completion] = float(await result_of(score, messages[:place], messages[place]))
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
    its reply and s' those before the next reply. Φ is 0 at the end, so the best policy stays the best. The
    last turn also gets the reward of the outcome.

    Args:
        phi: the potential Φ of a conversation: how much of the task it has done.
        outcome: the reward of the episode; None: 0.
        discount: γ of the algorithm's credit, `algorithm.turn_discount`.

    The returned function raises ValueError for an episode that no proxy recorded.
    """

    async def shaped(episode: FinishedEpisode) -> dict[str, float]:
        messages, ids = episode.messages, _completions(episode)
        turns = _sampled(ids[-1]) if ids else []
        if not turns:
            return {}
        before = [float(await result_of(phi, messages[:place])) for place, _ in turns]
        rewards = {
            completion: discount * later - now
            for (_, completion), now, later in zip(turns, before, [*before[1:], 0.0], strict=True)
        }
        if outcome is not None:
            rewards[turns[-1][1]] += await _score_of(outcome, episode)
        return rewards

    return shaped


async def _score_of(score: Score, episode: FinishedEpisode) -> float:
    """Return the score of an episode. Raises ValueError if it is not finite."""
    value = float(await result_of(score, episode))
    if not math.isfinite(value):
        name = getattr(score, "__name__", str(score))
        raise ValueError(f"the score of {name} must be finite, got {value}")
    return value


def _completions(episode: FinishedEpisode) -> Sequence[Sequence[str | None]]:
    """Return the completion ids of an episode. Raises ValueError if no proxy recorded it."""
    if len(episode.completions) != len(episode.branches):
        raise ValueError("turns can be rewarded only in episodes that a proxy has recorded")
    return episode.completions


def _sampled(completions: Sequence[str | None]) -> list[tuple[int, str]]:
    """Return (index, completion id) of the messages that the policy sampled."""
    return [(place, one) for place, one in enumerate(completions) if one is not None]
