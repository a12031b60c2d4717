"""The navigation of the documentation lists every page. `make docs` builds the site and checks its links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FROM_THE_ROOT = {"index.md", "contributing.md", "changelog.md"}


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, in which a tag names a Python function."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(entry)]


def test_every_page_is_in_the_navigation_once() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)  # noqa: S506
    pages = pages_of(config["nav"])
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages) == sorted(written | FROM_THE_ROOT)
