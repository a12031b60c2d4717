"""`python -m benchmarks rewards` in miniature: every answer is judged correctly, even while one hangs."""

from __future__ import annotations

import pytest

from areal_agents.errors import RewardError
from benchmarks import rewards


def test_comparisons_are_timed_alone_and_while_another_one_hangs() -> None:
    figures = rewards.measure_math(64, limit_s=8.0)
    assert figures.count == 64
    assert min(figures.numbers_per_s, figures.expressions_per_s, figures.beside_hanging_per_s) > 0
    assert figures.hanging_s >= 8.0, "it is ended at its limit"


def test_a_wrong_judgement_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "NUMBERS", [(r"\boxed{{{n}}}", "1{n}")])
    with pytest.raises(RewardError, match="were not taken for equal"):
        rewards.measure_math(1)
