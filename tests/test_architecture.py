"""docs/architecture.md names modules and tests that exist, and every package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/architecture.md").read_text()


def test_every_path_exists() -> None:
    named = set(re.findall(r"\b(?:areal_agents|tests|integrations|docs)/[\w./]*\w", PAGE))
    assert len(named) > 60
    assert not {path for path in named if not (ROOT / path).exists()}


def test_every_package_has_a_line() -> None:
    packages = {path.parent.name for path in (ROOT / "areal_agents").glob("*/*.py")}
    assert packages == set(re.findall(r"^\| `areal_agents/(\w+)` \|", PAGE, re.MULTILINE))


def test_the_page_is_linked() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "docs/architecture.md" in (ROOT / page).read_text()
