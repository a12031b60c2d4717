"""The examples are folders of scripts, whose modules import each other by their plain names."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_agents.errors import AgentError
from areal_agents.rewards import MathChecks
from areal_agents.user_functions import load_function

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = (
    "search_agent",
    "repair_tasks",
    "conversation",
    "deep_search",
    "code",
    "multi_turn_math",
    "math",
    "tool_math",
    "games",
    "online",
    "",
)

sys.path[:0] = [str(EXAMPLES / name) for name in FOLDERS]


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return EXAMPLES / "search_agent" / "model"


@pytest.fixture(scope="session")
def tool_math_loop() -> Iterator[asyncio.Runner]:
    """One event loop for all episodes of tool_math, because its agent keeps one HTTP client."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def patient_checks() -> Iterator[MathChecks]:
    """Compares answers as the examples do. A comparison may take long, because one that exceeds its limit
    counts as unequal."""
    found = MathChecks(processes=1, time_s=60.0)
    yield found
    found.close()


@pytest.fixture
def patient_tool_math(monkeypatch: pytest.MonkeyPatch, patient_checks: MathChecks) -> None:
    """Lets the programs and the comparisons of tool_math take long."""
    agent = load_function(f"{EXAMPLES / 'tool_math' / 'agent.py'}:converse", AgentError)
    monkeypatch.setitem(agent.__globals__, "CHECKS", patient_checks)
    monkeypatch.setattr("python_tool.TIME_S", 60.0)
