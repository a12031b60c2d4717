"""Prints a report on rewards: what each player earned, the facts, the findings and the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from areal_agents.doctor.report import Verdict
from areal_agents.doctor.rewards.report import PlayerGrades, RewardReport
from areal_agents.doctor.show import show_findings

WORDS: dict[Verdict, str] = {
    "ok": "ok: nothing was found that speaks against these rewards",
    "remarks": "these rewards can be trained on, with remarks",
    "cannot": "do not train on these rewards yet",
}


def show_rewards(report: RewardReport, console: Console) -> None:
    """Print a report."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("player", "mean", "least", "most", "failed", ""):
        table.add_column(heading, justify="left" if heading in ("player", "") else "right")
    for player in report.players:
        table.add_row(*(escape(cell) for cell in _row(player)))
    console.print(table)
    facts = report.facts
    console.print(
        f"\n{facts.tasks} tasks, {facts.episodes} episodes; {facts.scores} different scores, standard "
        f"deviation {facts.spread:.3g}; groups of {facts.group_size} with equal scores, for a policy that "
        f"{_policy(report)}: {facts.equal_groups:.0%}",
        highlight=False,
    )
    if facts.grade_s is not None and facts.longest_grade_s is not None:
        console.print(
            f"the reward function took {_time(facts.grade_s)} on average, at most "
            f"{_time(facts.longest_grade_s)}",
            highlight=False,
        )
    show_findings(report.findings, report.verdict, WORDS, console)


def _row(player: PlayerGrades) -> tuple[str, ...]:
    scores = list(player.scores.values())
    failed = sum(grade.score is None for grade in player.grades)
    numbers = [f"{value:.3g}" for value in (player.mean, min(scores), max(scores))] if scores else ["–"] * 3
    return (player.name, *numbers, str(failed) if failed else "", player.what)


def _policy(report: RewardReport) -> str:
    if report.facts.best_form is None:
        return "plays like these players at random"
    return "gives the right answer half of the time and else plays like another player"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
