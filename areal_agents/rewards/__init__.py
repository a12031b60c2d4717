"""Reward functions: pure functions that score an answer against the expected one."""

from __future__ import annotations

from areal_agents.rewards.qa import exact_match, normalise

__all__ = ["exact_match", "normalise"]
