"""The attacks of `make attack` that do not depend on the machine's speed and, as a slow test, all attacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_attack import attacks, main


@pytest.mark.timeout(600)
def test_web_pages_forged_tokens_and_invalid_engine_responses_are_repelled(tmp_path: Path) -> None:
    rows = list(attacks(tmp_path, ["web", "forged", "lying"], one_whole_lie_of=6))
    speed = [row for row in rows if "p99" in row.expected]  # checked by `make attack`
    assert [row for row in rows if not row.holds and row not in speed] == []
    assert speed and all(row.found.startswith("0 calls failed") for row in speed)
    assert {row.kind for row in rows} == {"web", "forged", "lying"} and len(rows) > 80


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_attack_is_repelled() -> None:
    assert main([]) == 0
