"""The attacks of `make attack` that do not depend on the machine's speed and, as a slow test, all attacks."""

from __future__ import annotations

import math
from pathlib import Path

import big_support
import lying_support
import pytest
import slow_support
from run_attack import attacks, main


@pytest.fixture(autouse=True)
def calls_of_the_neighbour_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their times depend on the machine, and only `make attack` limits them. None of them may fail."""
    for module in (big_support, lying_support, slow_support):
        monkeypatch.setattr(module, "P99_MS", math.inf)


@pytest.mark.timeout(600)
def test_web_pages_forged_tokens_and_invalid_engine_responses_are_repelled(tmp_path: Path) -> None:
    rows = list(attacks(tmp_path, ["web", "forged", "lying"], one_whole_lie_of=6))
    assert [row for row in rows if not row.holds] == []
    assert {row.kind for row in rows} == {"web", "forged", "lying"} and len(rows) > 80
    beside = [row for row in rows if row.attack.startswith("an honest caller beside")]
    assert len(beside) == 2 and all(row.found.startswith("0 calls failed") for row in beside)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_attack_is_repelled() -> None:
    assert main([]) == 0
