"""What follows from the grades of all players."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from areal_agents.doctor.rewards.report import PlayerGrades, RewardFacts

RIGHT_SHARE = 0.5  # of the episodes of a group that give the right answer, if it is known


def facts_of(players: Sequence[PlayerGrades], *, group_size: int) -> RewardFacts:
    """Return the facts of these grades."""
    tasks = list(dict.fromkeys(grade.task for player in players for grade in player.grades))
    knowing = [player for player in players if player.knows and player.mean is not None]
    best = max(knowing, key=lambda player: player.mean or 0.0, default=None)  # the first of equals
    policies = [player for player in players if player is best or not player.knows]
    scored = {task: [p for p in policies if task in p.scores] for task in tasks}
    every = [player.scores[task] for task, played in scored.items() for player in played]
    grades = [grade for player in players for grade in player.grades]
    times = [grade.grade_s for grade in grades if grade.grade_s is not None]
    equal = [_equal(task, played, best, group_size) for task, played in scored.items() if played]
    return RewardFacts(
        tasks=len(tasks),
        equal_groups=statistics.fmean(equal) if equal else 0.0,
        group_size=group_size,
        flat_tasks=tuple(
            task for task, played in scored.items() if len({player.scores[task] for player in played}) == 1
        ),
        scores=len(set(every)),
        spread=statistics.pstdev(every) if every else 0.0,
        grade_s=statistics.fmean(times) if times else None,
        longest_grade_s=max(times, default=None),
        failures=sum(grade.score is None for grade in grades),
        episodes=len(grades),
        best_form=best.name if best else None,
    )


def _equal(task: str, players: Sequence[PlayerGrades], best: PlayerGrades | None, group_size: int) -> float:
    """Return the probability Σ p(score)^group_size that all episodes of a group have the same score."""
    others = [player for player in players if player is not best]
    right = (RIGHT_SHARE if others else 1.0) if best is not None and best in players else 0.0
    shares: dict[float, float] = defaultdict(float)
    for player in players:
        shares[player.scores[task]] += right if player is best else (1 - right) / len(others)
    return sum(share**group_size for share in shares.values())
