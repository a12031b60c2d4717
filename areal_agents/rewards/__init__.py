"""Reward functions, and what they are given: an answer and the expected one, or an episode that has ended."""

from __future__ import annotations

from areal_agents.rewards.finished import FinishedEpisode
from areal_agents.rewards.judges import group_judge, judge
from areal_agents.rewards.qa import exact_match, normalise

__all__ = ["FinishedEpisode", "exact_match", "group_judge", "judge", "normalise"]
