"""The report on rewards as data: what each player earned, what follows from it, and the findings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from areal_agents.doctor.report import Finding, Verdict, verdict_of


@dataclass(frozen=True, slots=True)
class Grade:
    """One episode of a player.

    Attributes:
        task: the id of the task.
        score: the sum of its rewards; None if the episode failed.
        error: why it failed; "" if it did not.
        grader_failed: whether the reward function failed, and not the agent.
        again: the value of the reward function for the same episode a second time, if it differs from the
            first; None otherwise.
        grade_s: seconds that the reward function took; None without a reward function.
        episode_s: seconds that the whole episode took.
        names_form: whether a prompt of the episode has the characters that the player's form puts around the
            answer, or names the form in words.
        both_rewarded: see `rollout.agents.attempt.Outcome`.
    """

    task: str
    score: float | None
    error: str = ""
    grader_failed: bool = False
    again: float | None = None
    grade_s: float | None = None
    episode_s: float = 0.0
    names_form: bool = False
    both_rewarded: str = ""


@dataclass(frozen=True, slots=True)
class PlayerGrades:
    """What a player did and earned.

    Attributes:
        knows, guesses: see `Player`.
    """

    name: str
    what: str
    knows: bool
    guesses: bool
    grades: tuple[Grade, ...]

    @property
    def scores(self) -> dict[str, float]:
        """The scores by task, without those of episodes that failed."""
        return {grade.task: grade.score for grade in self.grades if grade.score is not None}

    @property
    def mean(self) -> float | None:
        """The mean score; None if every episode failed."""
        return sum(self.scores.values()) / len(self.scores) if self.scores else None


@dataclass(frozen=True, slots=True)
class RewardFacts:
    """What follows from the grades.

    Attributes:
        tasks: number of tasks that were played.
        equal_groups: the expected share of groups whose scores are all equal, if a policy gives the right
            answer half of the time, and else plays like another player, chosen at random. Without known
            answers it always does the latter. Of the forms of the right answer only the best counts, here
            and in `flat_tasks`, `scores` and `spread`.
        group_size: episodes of a group.
        flat_tasks: ids of the tasks on which all players earn the same.
        scores: number of different scores.
        spread: standard deviation of all scores.
        grade_s, longest_grade_s: mean and maximum of the seconds of a call of the reward function; None
            without one.
        failures: number of episodes that failed.
        episodes: number of episodes.
        best_form: the name of the player that knows the answers and earned most; None if none are known.
    """

    tasks: int
    equal_groups: float
    group_size: int
    flat_tasks: tuple[str, ...]
    scores: int
    spread: float
    grade_s: float | None
    longest_grade_s: float | None
    failures: int
    episodes: int
    best_form: str | None


@dataclass(frozen=True, slots=True)
class RewardReport:
    """What the players earned, and the findings, the worst first."""

    players: tuple[PlayerGrades, ...]
    facts: RewardFacts
    findings: list[Finding]

    @property
    def verdict(self) -> Verdict:
        """Whether the rewards can be trained on."""
        return verdict_of(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        players = [{"mean": player.mean, **dataclasses.asdict(player)} for player in self.players]
        return {
            "verdict": self.verdict,
            "facts": dataclasses.asdict(self.facts),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "players": players,
        }
