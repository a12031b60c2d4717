"""`python -m integrations`: runs the agents of other frameworks, and writes docs/integrations.md."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from areal_agents.cli import run_app
from areal_agents.errors import ConfigError
from benchmarks.proxy.qwen_vocabulary import qwen_folder
from integrations.cases import CASES, Case
from integrations.commands import CommandFailed
from integrations.environments import ENVIRONMENTS, GROUPS, Environments
from integrations.page import PAGE, Row, Verdict, read_rows, worse_rows, write_page
from integrations.running import Engine, run_case, scripted_engine

_LONGEST_ERROR = 300

app = typer.Typer(
    help="Run the agents of other frameworks through a proxy, and write their table.", add_completion=False
)


@app.command()
def main(
    only: Annotated[
        str, typer.Option(help="Folders or ids of cases, separated by commas; all others keep their rows.")
    ] = "",
    page: Annotated[Path, typer.Option(help="The page to read and write.")] = PAGE,
) -> None:
    """Run agents and write their rows. The exit status is 1 if a verdict is worse than the page had it."""
    chosen = chosen_cases(CASES, only)
    with scripted_engine(qwen_folder()) as engine:
        worse = update_page(page, CASES, chosen, engine, Environments(GROUPS, ENVIRONMENTS), say=typer.echo)
    if worse:
        typer.echo("worse than before:\n" + "\n".join(worse), err=True)
        raise typer.Exit(1)


def chosen_cases(cases: Sequence[Case], only: str) -> list[Case]:
    """Return the cases that `only` names. Raise ConfigError for a name of none."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {name for case in cases for name in (case.folder, case.id)}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no integration {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return [case for case in cases if not names or case.folder in names or case.id in names]


def update_page(
    page: Path,
    cases: Sequence[Case],
    chosen: Sequence[Case],
    engine: Engine,
    environments: Environments,
    *,
    say: Callable[[str], object],
) -> list[str]:
    """Run the chosen cases and write their rows; the other cases keep the rows that they have.

    The page is written after every case, so that an interrupted run keeps what it has.

    Returns:
        A sentence for each verdict that is worse than it was in the page.
    """
    before = read_rows(page)
    rows = {case.id: before[case.id] for case in cases if case.id in before}
    for case in sorted(chosen, key=lambda case: (case.group, case.id)):
        row = rows[case.id] = row_for(case, engine, environments)
        write_page(page, rows.values())
        say(f"{case.id}: {row.verdict.value}; reused {row.reused}, trained {row.trained}. {row.remark}")
    return worse_rows(before, [rows[case.id] for case in chosen])


def row_for(case: Case, engine: Engine, environments: Environments) -> Row:
    """Install the environment of a case if need be, run it, and return its row. A failure is a row, too."""
    version, date = environments.pinned_version(case), datetime.date.today().isoformat()

    def failed_row(why: str) -> Row:
        return Row(
            id=case.id,
            folder=case.folder,
            package=case.package,
            version=version,
            verdict=Verdict.FAILS,
            date=date,
            remark=why,
        )

    if case.cannot:
        return failed_row(case.cannot)
    try:
        environment = environments.prepared(case)
    except CommandFailed as failed:
        why = " ".join(str(failed).split())[-_LONGEST_ERROR:]
        return failed_row(f"its environment cannot be installed: {why}")
    return run_case(case, environment, engine, version=version, date=date)


if __name__ == "__main__":
    run_app(app)
