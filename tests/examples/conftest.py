"""The example is a folder of scripts: its modules import each other by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SEARCH_AGENT = Path(__file__).parents[2] / "examples" / "search_agent"

sys.path.insert(0, str(SEARCH_AGENT))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return SEARCH_AGENT / "model"
