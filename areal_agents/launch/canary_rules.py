"""The rules of a run's canary: what the trainer judges by, and what the operator's command shows."""

from __future__ import annotations

from areal_agents.rollout.config import CanaryConfig
from areal_agents.training.canary.judging import CanaryRules


def canary_rules(canary: CanaryConfig | None) -> CanaryRules | None:
    """Return the rules that a configuration describes, or None without a canary."""
    if canary is None:
        return None
    low, high = canary.scores
    return CanaryRules(
        share=canary.share,
        steps=canary.steps,
        alpha=canary.alpha,
        low=low,
        high=high,
        least_gain=canary.least_gain,
        most_conversations=canary.most_conversations,
        undecided=canary.undecided,
        settle_s=canary.settle_s,
    )
