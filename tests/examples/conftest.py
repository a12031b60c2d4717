"""The examples are folders of scripts, whose modules import each other by their plain names."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def tool_math_loop() -> Iterator[asyncio.Runner]:
    """One event loop for all episodes of tool_math, because its agent keeps one HTTP client."""
    with asyncio.Runner() as runner:
        yield runner
