"""Reward functions: pure functions from an answer and the expected one to a score."""

from __future__ import annotations

from areal_agents.rewards.qa import exact_match, normalise

__all__ = ["exact_match", "normalise"]
