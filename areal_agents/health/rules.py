"""Rules about the metrics of a run: each names a condition that prevents learning, and what to change.

A rule looks at the last `WINDOW` steps, so that a single batch does not set it off; docs/metrics.md says
which values are healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

WINDOW = 5  # steps

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds: its name, what was seen, and what helps."""

    name: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}. {self.fix}"


@dataclass(frozen=True, slots=True)
class Rule:
    """`seen` returns what was seen in the latest rows, or "" if the condition does not hold."""

    name: str
    seen: Callable[[Rows], str]
    fix: str


def findings(rows: Rows) -> list[Finding]:
    """Return the conditions that hold in the latest steps; none before there are `WINDOW` steps.

    Args:
        rows: the rows of metrics.jsonl, oldest first.
    """
    if len(rows) < WINDOW:
        return []
    found = [(rule, rule.seen(rows)) for rule in RULES]
    return [Finding(rule.name, text, rule.fix) for rule, text in found if text]


def _mean(rows: Rows, name: str) -> float | None:
    """Return the mean of a metric over the latest steps, without the steps that have none."""
    values = [row[name] for row in rows[-WINDOW:] if row.get(name) is not None]
    return fmean(values) if values else None


def _above(name: str, limit: float, text: str) -> Callable[[Rows], str]:
    """Return a check that the mean of a metric is above a limit; `text` is formatted with it."""

    def seen(rows: Rows) -> str:
        value = _mean(rows, name)
        return text.format(value) if value is not None and value > limit else ""

    return seen


def _below(name: str, limit: float, text: str) -> Callable[[Rows], str]:
    def seen(rows: Rows) -> str:
        value = _mean(rows, name)
        return text.format(value) if value is not None and value < limit else ""

    return seen


def _equal_groups(rows: Rows) -> str:
    latest = rows[-WINDOW:]
    if any(row["groups_solved_some"] for row in latest):
        return ""
    if _mean(rows, "kl_behavior_k3") is None:  # imported episodes are learned whatever their scores
        return ""
    every, none = (sum(row[f"groups_solved_{which}"] for row in latest) for which in ("all", "none"))
    if not every + none:
        return ""
    kinds = {(True, False): "every episode succeeds", (False, True): "no episode succeeds"}
    kind = kinds.get((bool(every), bool(none)), "each task is either always or never solved")
    return f"in the last {WINDOW} steps, all groups had equal scores ({kind}), so nothing can be learned"


def _collapsed_entropy(rows: Rows) -> str:
    first, now = rows[0].get("entropy"), _mean(rows, "entropy")
    if first is None or now is None or now > 0.05 or now > 0.3 * first:
        return ""
    solved, differing, groups = (
        sum(row[f"groups_solved_{which}"] for row in rows[-WINDOW:] for which in kinds)
        for kinds in (("all",), ("some",), ("all", "some", "none"))
    )
    # A policy that has learned its tasks is sure of what it does; one whose scores differ still explores.
    if 3 * solved > groups or 2 * differing >= groups:
        return ""
    return f"the entropy fell from {first:.3f} to {now:.3f} nats: the policy no longer explores"


def _rising_kl(rows: Rows) -> str:
    if len(rows) < 2 * WINDOW:
        return ""
    before, now = _mean(rows[:-WINDOW], "kl_behavior_k3"), _mean(rows, "kl_behavior_k3")
    if before is None or now is None or now < 0.1 or now < 2 * before:
        return ""
    return f"the KL divergence from the behavior policy rises: {before:.3f}, then {now:.3f} nats"


def _skipped(rows: Rows) -> str:
    skipped = sum(row["skipped_steps"] for row in rows[-WINDOW:])
    if not skipped:
        return ""
    return f"in the last {WINDOW} steps, {skipped} gradients were not finite and their updates were left out"


def _without_tools(rows: Rows) -> str:
    share = _mean(rows, "rewarded_without_tools")
    if share is None or share < 0.5:
        return ""
    return f"{share:.0%} of the episodes that succeed call none of their tools"


def _growing_answers(rows: Rows) -> str:
    share = _mean(rows, "truncated_share")
    if share is None or share <= 0.3:
        return ""
    return f"{share:.0%} of the episodes run into a limit before they end"


_WAITS = 0.7  # share of the time


def _waiting_trainer(rows: Rows) -> str:
    trainer, engines = _mean(rows, "trainer_idle"), _mean(rows, "rollout_idle")
    if trainer is None or trainer <= _WAITS or (engines is not None and engines > _WAITS):
        return ""
    return f"the trainer waits for groups {trainer:.0%} of the time"


def _all_wait(rows: Rows) -> str:
    trainer, engines = _mean(rows, "trainer_idle"), _mean(rows, "rollout_idle")
    if trainer is None or engines is None or trainer <= _WAITS or engines <= _WAITS:
        return ""
    return (
        f"the trainer waits for groups {trainer:.0%} of the time, and the engines wait for calls "
        f"{engines:.0%} of it"
    )


RULES = (
    Rule(
        "equal groups",
        _equal_groups,
        "Choose harder or easier tasks, give partial rewards, or raise rollout.group_size; "
        "areal-agents doctor --rewards examines the reward function",
    ),
    Rule("not finite", _skipped, "Lower trainer.lr, and look for extreme rewards or lengths"),
    Rule(
        "mismatch",
        _above(
            "logprob_diff_on_policy_mean",
            0.05,
            "engine and trainer compute different logprobs for the same weights: {:.3f} nats on average",
        ),
        "Give both one dtype (engine.dtype, trainer.dtype), and see docs/sglang.md for the server's flags",
    ),
    Rule(
        "rising KL",
        _rising_kl,
        "Lower trainer.lr or rollout.max_staleness, or use fewer minibatches",
    ),
    Rule(
        "small sample",
        _below(
            "ess", 0.5, "the effective sample size is {:.0%} of the batch: most tokens hardly count"
        ),
        "Lower rollout.max_staleness, so that the batch is younger",
    ),
    Rule(
        "no exploration",
        _collapsed_entropy,
        "Resume from an earlier checkpoint with a lower trainer.lr, a higher algorithm.clip_high, or an "
        "entropy bonus",
    ),
    Rule(
        "truncated",
        _growing_answers,
        "Raise rollout.limits or the agent's max_tokens, or penalise long answers (docs/rewards.md)",
    ),
    Rule(
        "reward without tools",
        _without_tools,
        "If the tools are needed for the task, the reward can be had without the work: "
        "areal-agents doctor --rewards says how",
    ),
    Rule(
        "old groups",
        _above("stale_groups_dropped", 0.5, "{:.1f} groups of each step are too old and are thrown away"),
        "Raise rollout.max_staleness, or lower rollout.concurrency",
    ),
    Rule(
        "bad groups",
        _above("groups_bad", 0.5, "{:.1f} groups of each step cannot be trained on"),
        "The log of the trainer names each group and the reason",
    ),
    Rule(
        "waiting trainer",
        _waiting_trainer,
        "Give the engines more of the machine (engine.replicas, engine.threads), or raise "
        "rollout.concurrency and rollout.max_staleness; areal-agents simulate compares such settings",
    ),
    Rule(
        "all wait",
        _all_wait,
        "The agents and their tools take the time, or the run is too small to keep the machine busy: make "
        "the agent's own work faster, or raise rollout.concurrency, rollout.max_staleness and rollout.groups",
    ),
)  # fmt: skip
