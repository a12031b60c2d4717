"""Reward functions, and what they are given: an answer and the expected one, or an episode that has ended."""

from __future__ import annotations

from areal_agents.rewards.code import ProgramRunner, code_tests, read_tests
from areal_agents.rewards.combining import clipped, gated, per_turn, potential, weighted
from areal_agents.rewards.finished import FinishedEpisode
from areal_agents.rewards.forms import (
    citation_f1,
    cited,
    fenced,
    follows_schema,
    grounded,
    json_answer,
    matches,
    overlong,
)
from areal_agents.rewards.judges import group_judge, judge
from areal_agents.rewards.mathematics import MathChecks, math_answer
from areal_agents.rewards.qa import best_of, exact_match, f1, normalise

__all__ = [
    "FinishedEpisode",
    "MathChecks",
    "ProgramRunner",
    "best_of",
    "citation_f1",
    "cited",
    "clipped",
    "code_tests",
    "exact_match",
    "f1",
    "fenced",
    "follows_schema",
    "gated",
    "group_judge",
    "grounded",
    "json_answer",
    "judge",
    "matches",
    "math_answer",
    "normalise",
    "overlong",
    "per_turn",
    "potential",
    "read_tests",
    "weighted",
]
