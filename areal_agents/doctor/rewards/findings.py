"""Finds reward that can be had without the work, and rewards that teach nothing, each with its fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from areal_agents.doctor.report import Finding, Severity
from areal_agents.doctor.rewards.players import ANSWER_FIELDS
from areal_agents.doctor.rewards.report import PlayerGrades, RewardFacts
from areal_agents.rollout.config import RewardConfig

MUCH, SOME = 0.5, 0.1  # shares of what the right answer earns, from which free reward is an error or a remark
SLOW_SHARE = 0.5  # of the time limit of the reward function
MANY_EQUAL = 0.5  # share of groups
_SHOWN = 3  # tasks and errors that a finding names


def findings_of(
    players: Sequence[PlayerGrades], facts: RewardFacts, reward: RewardConfig | None, *, given_up: str = ""
) -> list[Finding]:
    """Return all findings, the worst first. `given_up` says why no further episodes were played."""
    order: dict[Severity, int] = {"error": 0, "remark": 1, "note": 2}
    found = [
        *_given_up(given_up),
        *_failures(players),
        *_right_answer(players, facts),
        *_free(players, facts),
        *_equal(players, facts),
        *_grading(players, facts, reward),
        *_both_rewarded(players),
    ]
    return sorted(found, key=lambda finding: order[finding.severity])


def _given_up(reason: str) -> Iterator[Finding]:
    if reason:
        yield Finding(
            "error",
            f"No further episodes were played: {reason}.",
            "Give what the agent and the reward function wait for (servers, programs, loops) a time limit "
            "of its own. If they only need longer, raise reward.time_s and rollout.limits.time_s.",
        )


def _failures(players: Sequence[PlayerGrades]) -> Iterator[Finding]:
    for by_grader in (True, False):
        failed = [
            (player, grade)
            for player in players
            for grade in player.grades
            if grade.score is None and grade.grader_failed == by_grader
        ]
        if not failed:
            continue
        who = "The reward function" if by_grader else "The episode"
        causes = Counter(f"{player.name}: {grade.error}" for player, grade in failed).most_common(_SHOWN)
        episodes = sum(len(player.grades) for player in players)
        said = "; ".join(f"{cause} ({count}×)" if count > 1 else cause for cause, count in causes)
        all_fail = len(failed) == episodes
        yield Finding(
            "error" if all_fail or by_grader else "remark",
            f"{who} failed in {len(failed)} of {episodes} episodes. {said}",
            "Return the lowest reward for a reply that cannot be graded. A failed episode is attempted again "
            "and never trained, so the policy does not learn to avoid such replies."
            if by_grader
            else "If the replies are the reason, let the policy learn from them: rollout.agent_error: score.",
        )


def _right_answer(players: Sequence[PlayerGrades], facts: RewardFacts) -> Iterator[Finding]:
    best = _named(players, facts.best_form)
    if best is None:
        if any(player.knows for player in players):
            return  # the episodes with the right answer failed, which is a finding of its own
        yield Finding(
            "note",
            "No task holds its answer, so nothing is known about what the right answer earns.",
            f"If a field holds it, name the field with --answer; looked for: {', '.join(ANSWER_FIELDS)}.",
        )
        return
    plain = next(player for player in players if player.knows)
    blind = _most_by_task(players)
    unpaid = [task for task, score in best.scores.items() if score <= blind.get(task, score - 1)]
    if len(unpaid) == len(best.scores):
        yield Finding(
            "error",
            f"The right answer earns no more than players that do not know it in any of {facts.tasks} tasks, "
            f"however it is written: {_mean(best)} on average.",
            "Check what the reward compares. If the work is more than an answer (tool calls, files), this is "
            "expected; name a field that is the whole answer with --answer, or ignore this.",
        )
    elif unpaid:
        yield Finding(
            "remark",
            f"The right answer earns no more than other players in {len(unpaid)} of {facts.tasks} tasks: "
            f"{_some(unpaid)}.",
            "Check the answers of these tasks, or leave the tasks out: they teach nothing.",
        )
    elif best is not plain and not all(grade.names_form for grade in best.grades):
        yield Finding(
            "remark",
            f"The right answer earns {_mean(plain)} as it is and {_mean(best)} as {best.name!r}, and the "
            "prompts do not name this form.",
            "Tell the model in the prompt how to write its answer, or accept the plain answer too.",
        )


def _free(players: Sequence[PlayerGrades], facts: RewardFacts) -> Iterator[Finding]:
    best = _named(players, facts.best_form)
    lowest = _least_by_task(players)
    for player in players:
        if player.knows or not player.scores:
            continue
        earned = {task: score - lowest[task] for task, score in player.scores.items()}
        paid = [task for task, gain in earned.items() if gain > 0]
        if not paid:
            continue
        what = (
            f"The player {player.name!r}, which {player.what}, earns {_mean(player)} on average, and more "
            f"than the least that others earn in {len(paid)} of {len(earned)} tasks ({_some(paid)})"
        )
        if best is None:
            yield Finding("remark", f"{what}.", _FIX_FREE)
            continue
        possible = sum(best.scores.get(task, 0.0) - lowest[task] for task in earned)
        share = sum(earned.values()) / possible if possible > 0 else 1.0
        if share >= SOME:
            severity: Severity = "error" if share >= MUCH else "remark"
            yield Finding(severity, f"{what}: {share:.0%} of what the right answer earns.", _FIX_FREE)


_FIX_FREE = (
    "A policy finds such reward before it learns the task. Compare the whole answer and not parts of a "
    "reply, reward no form alone, check the work and not the claim, or leave these tasks out."
)


def _equal(players: Sequence[PlayerGrades], facts: RewardFacts) -> Iterator[Finding]:
    if facts.scores == 1:
        known = facts.best_form is not None
        yield Finding(
            "error" if known else "remark",
            "All players earn the same in all tasks.",
            "Groups with equal scores teach nothing. "
            + (
                "The right answer must earn more."
                if known
                else "Make sure that a policy that does the work earns more, at least sometimes."
            ),
        )
    elif facts.equal_groups > MANY_EQUAL:
        yield Finding(
            "remark",
            f"About {facts.equal_groups:.0%} of the groups of a policy that plays like these players "
            "have equal scores.",
            "Groups with equal scores teach nothing. Give part of the reward for part of the work, choose "
            f"tasks that the policy solves sometimes, or raise rollout.group_size ({facts.group_size}).",
        )
    elif facts.flat_tasks:
        yield Finding(
            "note",
            f"All players earn the same in {len(facts.flat_tasks)} of {facts.tasks} tasks: "
            f"{_some(facts.flat_tasks)}.",
            "Such tasks may teach nothing; look at one of them.",
        )


def _grading(
    players: Sequence[PlayerGrades], facts: RewardFacts, reward: RewardConfig | None
) -> Iterator[Finding]:
    differing = [(player, grade) for player in players for grade in player.grades if grade.again is not None]
    if differing:
        player, grade = differing[0]
        yield Finding(
            "remark",
            f"The reward function gives the same episode different rewards: {grade.score:g} and then "
            f"{grade.again:g} (task {grade.task}, {player.name}), in {len(differing)} of {facts.episodes} "
            "episodes.",
            "Such noise is trained on. Set a seed, set a judge's temperature to 0, or give it a cache.",
        )
    if reward is not None and (facts.longest_grade_s or 0.0) > SLOW_SHARE * reward.time_s:
        yield Finding(
            "remark",
            f"A call of the reward function took {facts.longest_grade_s:.1f} s, and may take "
            f"{reward.time_s:g} s.",
            "Raise reward.time_s, or make the reward function faster.",
        )


def _both_rewarded(players: Sequence[PlayerGrades]) -> Iterator[Finding]:
    both = [(p, grade) for p in players for grade in p.grades if grade.both_rewarded]
    if both:
        player, grade = max(both, key=lambda found: found[1].score or 0.0)
        yield Finding(
            "remark",
            f"The agent gives rewards, and `reward` too: {grade.both_rewarded} (task {grade.task}, "
            f"{player.name}).",
            "The score is the sum over all names. If `reward` is to be the only judge, let the agent return "
            "nothing; if both are meant, ignore this.",
        )


def _named(players: Sequence[PlayerGrades], name: str | None) -> PlayerGrades | None:
    return next((player for player in players if player.name == name), None)


def _most_by_task(players: Sequence[PlayerGrades]) -> dict[str, float]:
    """Return the most that a player without any answer earns, by task."""
    most: dict[str, float] = {}
    for player in players:
        for task, score in player.scores.items():
            if not (player.knows or player.guesses):
                most[task] = max(score, most.get(task, score))
    return most


def _least_by_task(players: Sequence[PlayerGrades]) -> dict[str, float]:
    least: dict[str, float] = {}
    for player in players:
        for task, score in player.scores.items():
            least[task] = min(score, least.get(task, score))
    return least


def _mean(player: PlayerGrades) -> str:
    return "nothing" if player.mean is None else f"{player.mean:.3g}"


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
