"""Hooks of mkdocs: README, CONTRIBUTING and CHANGELOG are pages too, and links to source files are names.

The site has no address of the repository, so a link from a page to a file outside docs/ shows its path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
MERMAID = ROOT / ".venv-docs" / "mermaid.min.js"
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|`[^`]*`)+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root of the repository, and the program that draws diagrams."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, "mermaid.min.js", abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between pages, which are written as GitHub resolves them."""
    own = {page: name for name, page in PAGES.items()}.get(page.file.src_uri)
    source = own or f"docs/{page.file.src_uri}"
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return found[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if wanted in PAGES:
            page_path = PAGES[wanted]
        elif wanted.startswith("docs/") and wanted.endswith((".md", ".png", ".svg")):
            page_path = wanted.removeprefix("docs/")
        else:
            return f"{text} (`{wanted}`)" if text.strip("`") != wanted else f"`{wanted}`"
        link = posixpath.relpath(page_path, here or ".")
        return f"[{text}]({link}{'#' + anchor if anchor else ''})"

    markdown = _LINK.sub(rewrite, markdown)
    return markdown.replace("](docs/images/", "](images/") if own else markdown
