"""The command `rerun`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from areal_agents.extras import require
from areal_agents.launch.signals import Interrupted


def add_commands(app: typer.Typer) -> None:
    """Add the command to a command line."""
    app.command()(rerun)


def rerun(
    run: Annotated[Path, typer.Argument(help="The folder of a run that has ended.", metavar="RUN")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="What is different, for example algorithm=gspo, algorithm.clip_high=0.4, "
            "reward=rewards.py:score or trainer.lr=1e-5; default: nothing.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    *,
    steps: Annotated[
        str,
        typer.Option(
            help="A:B trains the steps after A up to B, from the checkpoint of step A; 0 is the initial "
            "model. A: trains up to the last step of the run.",
            metavar="A:B",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write, new or empty; default: RUN-rerun-A-B."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the metrics of both as JSON when it has ended.")
    ] = False,
) -> None:
    """Train steps of a run again on its stored episodes, with other settings and without inference.

    The metrics of both are printed side by side, and `areal-agents view` shows the curves over one another.
    The run and its store are not written.
    """
    require("torch", "training")
    from areal_agents.evaluation.show import show_rescoring
    from areal_agents.launch.report.describe import describe_step
    from areal_agents.rerun.comparison import draw_side_by_side
    from areal_agents.rerun.run import rerun as train_again

    progress = Console(stderr=as_json, soft_wrap=True, highlight=False, markup=False)

    def on_step(row: Mapping[str, Any], last: int) -> None:
        progress.print(describe_step(row, last))

    try:
        found = train_again(run, steps, changes or (), out=out, say=progress.print, on_step=on_step)
    except Interrupted:
        progress.print("the rerun was stopped; it cannot be continued, only started again")
        raise
    if as_json:
        pairs = [asdict(pair) for pair in found.pairs]
        print(json.dumps({"run": str(run), "rerun": str(found.folder.root), "steps": pairs}))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    if found.rescoring is not None:
        show_rescoring(found.rescoring, console)
    draw_side_by_side(found.pairs, console)
    progress.print(f"weights: {found.folder.final_model}")
    progress.print(f"curves of both: areal-agents view {found.folder.root.parent}")
