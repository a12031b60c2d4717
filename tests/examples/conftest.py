"""The examples are folders of scripts: their modules import each other by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
