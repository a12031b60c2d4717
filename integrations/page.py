"""docs/integrations.md: its rows, which are read from the page and written back to it.

The page is generated whole. A row stays as it is until its case runs again, or is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from areal_agents.errors import ConfigError
from areal_agents.whole_files import replacing

PAGE = Path(__file__).parent.parent / "docs" / "integrations.md"


class Verdict(Enum):
    """How well an agent is trained, from the best to the worst."""

    TRAINED = "trained"
    REMARKS = "works with remarks"
    FAILS = "does not"

    def is_worse_than(self, other: Verdict) -> bool:
        """Whether this verdict comes after another one."""
        order = list(Verdict)
        return order.index(self) > order.index(other)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, which one case fills.

    Attributes:
        id: the id of the case.
        folder: of integrations/.
        package: the package whose `version` ran.
        date: the day on which the case ran.
        remark: why the agent fails, or why not everything is reused and trained.
        dialect: the APIs that were called.
        streamed: whether the calls were streamed.
        turns: the number of recorded turns.
        branches: the number of branches, and why they began.
        reused: the share of the tokens repeated from earlier turns that are recorded ids.
        trained: the share of the sampled tokens that training uses by default.
    """

    id: str
    folder: str
    package: str
    version: str
    verdict: Verdict
    date: str
    remark: str
    dialect: str = "–"
    streamed: str = "–"
    turns: str = "–"
    branches: str = "–"
    reused: str = "–"
    trained: str = "–"


_HEAD = """\
# Agents of other frameworks

Each row is an agent of [integrations/](../integrations/README.md), written as the documentation of its
framework writes one, in the version that the row names. It ran as it is, as a process of its own that
found the proxy through its environment variables, against a scripted engine whose replies are awkward on
purpose: odd JSON whitespace, escapes, 2.0, calls side by side, padded content, reasoning. An agent that
holds conversations is asked two questions; the model calls a tool once, then two side by side, and once
again. Command-line agents (`cli-…`) have one task in an empty folder, and run as a run starts them with
[`agent: {cli: …}`](agents.md#command-line-agents): the model calls their own shell or file tools once,
then two side by side, and answers. Those with `-acp` get a second prompt, in the Agent Client Protocol.

- **reused** is the share of the tokens repeated from earlier turns that a prompt has as recorded ids; the
  rest was rendered again. It is 100% if every call continues a turn or begins a conversation.
- **trained** is the share of the sampled tokens that training uses by default. All sampled tokens are
  recorded, exactly as the engine sampled them; a row whose record differs says so.
- The verdict is *trained* if both are 100%, *works with remarks* with the reason if not, and *does not*
  if the agent fails.

The proxy has `proxy.reasoning: keep`, so that every branch is due to the framework: with the default,
Qwen3's template drops earlier reasoning at a new question, and a branch begins there in every framework.
The measure is that of `areal-agents doctor`, which says the same of your own agent.

`make integrations` wrote this page. It installs each group of frameworks in an environment of its own
under `.venv-integrations/`; `make integrations ONLY=langgraph,crewai` runs some, and keeps the other
rows.
"""
_COLUMNS = (
    "agent",
    "version",
    "API",
    "streamed",
    "turns",
    "branches",
    "reused",
    "trained",
    "verdict",
    "date",
    "remark",
)
_TABLE_ROW = re.compile(
    r"^\| \[(?P<id>[^]]+)\]\(\.\./integrations/(?P<folder>[^)]+)\) \| (?P<package>\S+) (?P<version>\S+) \| "
)


def read_rows(page: Path) -> dict[str, Row]:
    """Return the rows of a page by the ids of their cases; none if there is no page.

    Raise ConfigError if a line of the table was not written by `write_page`.
    """
    lines = page.read_text().splitlines() if page.is_file() else []
    rows = [_row(line) for line in lines if line.startswith("| [")]
    return {row.id: row for row in rows}


def write_page(page: Path, rows: Iterable[Row]) -> None:
    """Write a page of these rows, sorted by the ids of their cases."""
    with replacing(page) as file:
        file.write_text(page_text(rows))


def page_text(rows: Iterable[Row]) -> str:
    """Return the text of a page."""
    rows = sorted(rows, key=lambda row: row.id)
    counts = [f"{sum(row.verdict is verdict for row in rows)} {verdict.value}" for verdict in Verdict]
    table = [
        f"| {' | '.join(_COLUMNS)} |",
        f"|{' --- |' * len(_COLUMNS)}",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
    ]
    folders = len({row.folder for row in rows})
    summary = f"{len(rows)} rows of {folders} agents: {', '.join(counts)}."
    return "\n".join([_HEAD, summary, "", *table, ""])


def worse_rows(before: Mapping[str, Row], now: Iterable[Row]) -> list[str]:
    """Return a sentence for each row whose verdict is worse than the recorded one."""
    return [
        f"{row.id}: {row.verdict.value}, before: {before[row.id].verdict.value}. {row.remark}"
        for row in now
        if row.id in before and row.verdict.is_worse_than(before[row.id].verdict)
    ]


def _cells(row: Row) -> list[str]:
    first = [f"[{row.id}](../integrations/{row.folder})", f"{row.package} {row.version}"]
    rest = [row.dialect, row.streamed, row.turns, row.branches, row.reused, row.trained]
    cells = [*first, *rest, row.verdict.value, row.date, row.remark]
    return [cell.replace("\n", " ").replace("|", "\\|") or "–" for cell in cells]


def _row(line: str) -> Row:
    cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    head = _TABLE_ROW.match(line)
    if head is None or len(cells) != len(_COLUMNS):
        raise ConfigError(f"this line of the table was not written by make integrations: {line}")
    verdicts = {verdict.value: verdict for verdict in Verdict}
    if cells[8] not in verdicts:
        raise ConfigError(f"a verdict must be one of {', '.join(verdicts)}, got {cells[8]!r}")
    dialect, streamed, turns, branches, reused, trained = cells[2:8]
    remark = "" if cells[10] == "–" else cells[10]
    return Row(
        **head.groupdict(),
        dialect=dialect,
        streamed=streamed,
        turns=turns,
        branches=branches,
        reused=reused,
        trained=trained,
        verdict=verdicts[cells[8]],
        date=cells[9],
        remark=remark,
    )
