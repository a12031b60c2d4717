"""Judges a candidate by the scores of the conversations on both sides.

The verdict is a function of the rows of the store, so a trainer that resumes goes on with the same
comparison, and the operator's command shows what the trainer sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from areal_agents.algorithms.sequential import Comparison, Verdict, compare
from areal_agents.inference.pool import is_of_canary
from areal_agents.store import Store, VersionRow


@dataclass(frozen=True, slots=True)
class CanaryRules:
    """How candidates are made and judged; docs/serve-and-train.md describes each.

    Attributes:
        share: the share of the conversations that candidates serve.
        steps: batches that are trained for each candidate.
        alpha: the probability, for each candidate, of promoting one that is no better, and that of rolling
            back one that is no worse, in each case by `least_gain`.
        low, high: the range of an episode's score.
        least_gain: by how much the mean score of a candidate must exceed that of the stable version.
        most_conversations: rewarded conversations of both sides together after which `undecided` applies.
        settle_s: how long after its end a conversation can still be rewarded, in seconds.
    """

    share: float
    steps: int
    alpha: float
    low: float
    high: float
    least_gain: float
    most_conversations: int
    undecided: Literal["promote", "roll_back"]
    settle_s: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known of a candidate, the verdict on it, and why it is that one."""

    comparison: Comparison
    verdict: Verdict
    reason: str

    def facts(self, rules: CanaryRules) -> dict[str, Any]:
        """Return what the row of the version keeps of it."""
        seen = self.comparison
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "conversations": {"candidate": seen.candidate, "stable": seen.stable},
            "mean": {"candidate": seen.candidate_mean, "stable": seen.stable_mean},
            "difference": [seen.least, seen.most],
            "alpha": rules.alpha,
        }


def judge(store: Store, candidate: VersionRow, rules: CanaryRules) -> Judgement:
    """Judge a candidate by the conversations that were opened since its engines serve it.

    An order of the operator comes before everything else. While the run is frozen there is no other verdict.
    """
    sides: dict[bool, list[float]] = {True: [], False: []}
    if candidate.canary_after is not None:
        for one in store.scored_conversations(after=candidate.canary_after, settle_s=rules.settle_s):
            of_canary = is_of_canary(one.id, rules.share)
            # The first call of a conversation may have been running while the candidate was swapped in.
            if not of_canary or one.version_min >= candidate.version:
                sides[of_canary].append(one.score)
    seen = compare(sides[True], sides[False], low=rules.low, high=rules.high, alpha=rules.alpha)
    if (order := store.order_for(candidate.version)) is not None:
        return Judgement(seen, order, "the operator ordered it")
    if store.is_frozen():
        return Judgement(seen, "go_on", "the operator has frozen the run")
    verdict = seen.verdict(rules.least_gain)
    if verdict == "promote":
        return Judgement(seen, verdict, f"its mean score is higher by more than {rules.least_gain:g}")
    if verdict == "roll_back":
        return Judgement(seen, verdict, f"its mean score is not higher by {rules.least_gain:g}")
    if seen.candidate + seen.stable >= rules.most_conversations:
        reason = f"{rules.most_conversations} conversations did not decide (rollout.canary.undecided)"
        return Judgement(seen, rules.undecided, reason)
    return Judgement(seen, "go_on", "more conversations are needed")
