"""Each rule about the metrics reports a finding when its condition holds, and none in a healthy run."""

from __future__ import annotations

from typing import Any

import pytest

from areal_agents.health.rules import RULES, WINDOW, findings

HEALTHY = {
    "groups_solved_all": 1, "groups_solved_some": 6, "groups_solved_none": 1, "skipped_steps": 0,
    "logprob_diff_on_policy_mean": 1e-5, "kl_behavior_k3": 0.002, "ess": 0.97, "entropy": 0.8,
    "truncated_share": 0.02, "rewarded_without_tools": 0.0, "stale_groups_dropped": 0, "groups_bad": 0,
    "trainer_idle": 0.2, "rollout_idle": 0.3,
}  # fmt: skip
CONDITIONS: dict[str, tuple[dict[str, Any], str]] = {
    "equal groups": ({"groups_solved_some": 0, "groups_solved_all": 0}, "no episode succeeds"),
    "not finite": ({"skipped_steps": 1}, "5 gradients were not finite"),
    "mismatch": ({"logprob_diff_on_policy_mean": 0.2}, "0.200 nats"),
    "rising KL": ({"kl_behavior_k3": 0.25}, "0.002, then 0.250"),
    "small sample": ({"ess": 0.31}, "31%"),
    "no exploration": (
        {"entropy": 0.01, "groups_solved_some": 2, "groups_solved_none": 5},
        "from 0.800 to 0.010",
    ),
    "truncated": ({"truncated_share": 0.5}, "50% of the episodes"),
    "reward without tools": ({"rewarded_without_tools": 0.9}, "90% of the episodes"),
    "old groups": ({"stale_groups_dropped": 2}, "2.0 groups"),
    "bad groups": ({"groups_bad": 1}, "1.0 groups"),
    "waiting trainer": ({"trainer_idle": 0.85}, "85% of the time"),
    "all wait": ({"trainer_idle": 0.79, "rollout_idle": 0.78}, "79% of the time, and the engines wait"),
}


def run(*, then: dict[str, Any]) -> list[dict[str, Any]]:
    """Return healthy steps, followed by a window of steps with other values."""
    return [HEALTHY] * WINDOW + [{**HEALTHY, **then}] * WINDOW


def test_every_rule_has_a_condition_here() -> None:
    assert {rule.name for rule in RULES} == CONDITIONS.keys()


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_rule_reports_what_it_saw_and_a_fix(name: str) -> None:
    values, said = CONDITIONS[name]
    (found,) = findings(run(then=values))
    assert found.name == name and said in found.text and found.fix
    once = [HEALTHY] * WINDOW + [{**HEALTHY, **values}] + [HEALTHY] * (WINDOW - 1)
    quiet_after_one = {"skipped_steps": 0}.get(next(iter(values)), 1)
    assert bool(findings(once)) == (quiet_after_one == 0)  # only a skipped update is reported after one step


def test_a_healthy_run_and_a_short_run_have_no_findings() -> None:
    assert findings(run(then={})) == []
    assert findings([{**HEALTHY, "ess": 0.1}] * (WINDOW - 1)) == []


def test_metrics_without_values_lead_to_no_finding() -> None:
    absent = {name: None for name in HEALTHY if name not in ("skipped_steps", "groups_solved_some")}
    counts = {"groups_solved_all": 0, "groups_solved_none": 0}
    assert findings([{**HEALTHY, **absent, **counts}] * (2 * WINDOW)) == []


def test_low_entropy_is_no_finding_once_many_tasks_are_solved() -> None:
    learned = {"entropy": 0.01, "groups_solved_all": 5, "groups_solved_some": 3, "groups_solved_none": 0}
    assert findings(run(then=learned)) == []


def test_low_entropy_is_no_finding_while_scores_in_most_groups_differ() -> None:
    """A policy that explores may have low entropy, since most tokens of an agent's calls are determined."""
    differing = {"entropy": 0.01, "groups_solved_all": 2, "groups_solved_some": 5, "groups_solved_none": 1}
    assert findings(run(then=differing)) == []


def test_the_finding_about_equal_groups_states_how_many_tasks_are_solved() -> None:
    def seen(every: int, none: int) -> str:
        groups = {"groups_solved_some": 0, "groups_solved_all": every, "groups_solved_none": none}
        return findings(run(then=groups))[0].text

    assert "every episode succeeds" in seen(8, 0)
    assert "each task is either always or never solved" in seen(4, 4)


def test_imported_episodes_with_equal_scores_are_no_finding() -> None:
    imported = {"groups_solved_some": 0, "groups_solved_all": 8, "kl_behavior_k3": None}
    assert findings([{**HEALTHY, **imported}] * WINDOW) == []
