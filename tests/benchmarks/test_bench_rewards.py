"""`python -m benchmarks rewards` in miniature: every answer is judged correctly, even while one hangs."""

from __future__ import annotations

from typing import Any

import pytest

from areal_agents.errors import RewardError
from areal_agents.rewards import mathematics
from benchmarks import rewards


def test_comparisons_are_timed_alone_and_while_another_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = mathematics._Process.ask

    def with_a_short_limit_if_it_hangs(
        process: mathematics._Process, answer: str, expected: str, worked_out: bool, time_s: float
    ) -> dict[str, Any] | None:
        return ask(process, answer, expected, worked_out, 2.0 if answer == rewards.HANGS else time_s)

    monkeypatch.setattr(mathematics._Process, "ask", with_a_short_limit_if_it_hangs)
    figures = rewards.measure_math(64, limit_s=60.0)
    assert figures.count == 64
    assert min(figures.numbers_per_s, figures.expressions_per_s, figures.beside_hanging_per_s) > 0
    assert figures.hanging_s >= 2.0, "it is ended at its limit"


def test_a_wrong_judgement_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "NUMBERS", [(r"\boxed{{{n}}}", "1{n}")])
    with pytest.raises(RewardError, match="were not taken for equal"):
        rewards.measure_math(1)
