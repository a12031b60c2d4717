"""The examples are folders of scripts: their modules import each other by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SEARCH_AGENT, REPAIR_TASKS = EXAMPLES / "search_agent", EXAMPLES / "repair_tasks"
CONVERSATION = EXAMPLES / "conversation"

sys.path[:0] = map(str, (SEARCH_AGENT, REPAIR_TASKS, CONVERSATION, EXAMPLES))
DEEP_SEARCH = EXAMPLES / "deep_search"

sys.path[:0] = map(str, (SEARCH_AGENT, REPAIR_TASKS, DEEP_SEARCH, EXAMPLES))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return SEARCH_AGENT / "model"
