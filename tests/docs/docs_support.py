"""The code blocks of the pages, and commands that run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "docs/decisions/*.md", "examples/*/*.md", "integrations/*.md")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"
)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: str
    line: int
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All code blocks in these languages, or in any language if none is given."""
    found = []
    for page in PAGES:
        lines = page.read_text().splitlines()
        name = str(page.relative_to(ROOT))
        found += [block for block in _fenced(name, lines) if not languages or block.language in languages]
    return found


def _fenced(page: str, lines: list[str]) -> Iterator[Block]:
    start = language = indent = None
    for number, line in enumerate(lines, 1):
        fence = re.match(r"( *)```(\w*)", line)
        if fence is None:
            continue
        if start is None:
            start, indent, language = number, len(fence[1]), fence[2]
        else:
            text = "\n".join(inner[indent:] for inner in lines[start : number - 1])
            yield Block(page, start, language or "", text)
            start = None
    assert start is None, f"{page}:{start}: the block has no end"


def block(page: str, beginning: str) -> Block:
    """The block of a page that has a line with this beginning."""
    pattern = re.compile("^" + re.escape(beginning), re.MULTILINE)
    found = [b for b in blocks() if b.page == page and pattern.search(b.text)]
    assert len(found) == 1, f"{len(found)} blocks of {page} have a line that begins with {beginning!r}"
    return found[0]


def commands(script: str) -> list[list[str]]:
    """The words of each command of a bash script, without comments and variables set before the command."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return found


def environment(**more: str) -> dict[str, str]:
    """Variables with this environment's programs on the PATH, without those that name a model server."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "ANTHROPIC_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), **more}


def bash(script: str, folder: Path, *, timeout_s: float = 240, **variables: str) -> str:
    """Run a script, which must succeed, and return its standard output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
