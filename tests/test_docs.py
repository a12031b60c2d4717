"""What the Markdown pages refer to exists: files, headings, commands, and targets of the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.core
import typer.main

import areal_agents.cli
import benchmarks.__main__

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for folder in ("", "docs", "docs/decisions", "examples/*", "integrations", "integrations/*", "benchmarks")
    for page in ROOT.glob(f"{folder}/*.md" if folder else "*.md")
    if page.name != "CHANGELOG.md"  # it names files that no longer exist
)
TOP = ("areal_agents", "benchmarks", "docs", "examples", "integrations", "tests")
EXAMPLES = {
    "areal_agents/algorithms/losses/tapered.py",  # a page tells the reader to write it
    "tests/test.sh",  # a file in a task folder of Harbor
}


def _in_code(pattern: str) -> list[tuple[str, str]]:
    """Return the matches of a pattern in code spans and code blocks, each with the name of its page."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```.*?^```|^    .*?$|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
        found += [(page.name, name) for block in blocks for name in re.findall(pattern, block)]
    return found


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_pages_are_found() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert names >= {"README.md", "CONTRIBUTING.md", "docs/protocol.md", "integrations/README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_targets_of_links_exist(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    named = re.findall(rf"(?<![\w/.\-])((?:{'|'.join(TOP)})/[\w./\-]*\w)", page.read_text())
    assert not {path for path in set(named) - EXAMPLES if not (ROOT / path).exists()}


def test_named_commands_exist() -> None:
    named = _in_code(r"\bareal-agents ([a-z]+)\b")
    assert len(named) > 10
    commands = _commands(areal_agents.cli.app)
    assert not {(page, name) for page, name in named if name not in commands}


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z\-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = _in_code(r"\bmake ([a-z\-]+)\b")
    assert len(named) > 5
    assert not {(page, name) for page, name in named if name not in targets}


def test_named_benchmarks_exist() -> None:
    named = _in_code(r"python -m benchmarks ([a-z_]+)")
    assert len(named) > 5
    commands = _commands(benchmarks.__main__.app)
    assert not {(page, name) for page, name in named if name not in commands}


def test_the_page_on_sglang_names_every_flag_that_a_server_is_started_with() -> None:
    source = (ROOT / "areal_agents" / "inference" / "sglang" / "server.py").read_text()
    flags = set(re.findall(r'"(--[a-z0-9\-]+)"', source))
    assert len(flags) > 20
    page = (ROOT / "docs" / "sglang.md").read_text()
    assert not {flag for flag in flags if not re.search(rf"{flag}(?![\w\-])", page)}


def _commands(app: typer.Typer) -> set[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return set(group.commands)
