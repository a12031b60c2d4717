"""Writes the tables of docs/environments.md from the declarations of the schemes.

    python -m areal_agents.environments.reference docs/environments.md

Each table stands between two comments, which name it; the rest of the page is kept.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from areal_agents.environments.schemes import SCHEMES, Option


def updated(page: str) -> str:
    """Return a page with its tables as they are declared. Raises ValueError if it has no place for one."""
    for name, table in _TABLES.items():
        place = re.compile(f"(<!-- table of {name} -->\n).*?(<!-- end of table -->)", re.DOTALL)
        if not place.search(page):
            raise ValueError(f"the page has no comments around its table of {name}")
        page = place.sub(lambda found, table=table: found[1] + table() + found[2], page)  # type: ignore[misc]
    return page


def schemes() -> str:
    """Return the table of the schemes."""
    rows = [
        "| scheme | an example | what is played | tasks | reward | what pip installs |",
        "| --- " * 6 + "|",
    ]
    for name, scheme in SCHEMES.items():
        package = f"`{scheme.requirement}`" if scheme.requirement else ""
        cells = (f"`{name}`", f"`{scheme.example}`", scheme.played, scheme.tasks, scheme.reward, package)
        rows.append(f"| {' | '.join(cells)} |")
    return _lines(rows)


def options() -> str:
    """Return the table of the options; an option of several schemes has one row."""
    owners: dict[Option, list[str]] = {}
    for name, scheme in SCHEMES.items():
        for option in scheme.options:
            owners.setdefault(option, []).append(f"`{name}`")
    rows = ["| option | schemes | default | meaning |", "| --- " * 4 + "|"]
    for option, names in owners.items():
        default = option.shown or str(option.default)
        rows.append(f"| `{option.name}` | {', '.join(names)} | {default} | {option.meaning} |")
    return _lines(rows)


def _lines(rows: list[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


_TABLES: Mapping[str, Callable[[], str]] = {"schemes": schemes, "options": options}


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
