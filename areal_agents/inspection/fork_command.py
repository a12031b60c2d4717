"""The command `fork`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_agents.errors import ConfigError
from areal_agents.extras import require


def fork(
    episode: Annotated[str, typer.Argument(help="The id of the episode.", metavar="EPISODE")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that override the run's configuration.", metavar="KEY=VALUE"),
    ] = None,
    *,
    turn: Annotated[
        str, typer.Option("--turn", help="The turn that is sampled again: its number from 1, or its id.")
    ],
    count: Annotated[int, typer.Option("-k", min=1, help="Number of continuations.")] = 8,
    run: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the run, or a store file. Default: the current folder if it is a run's, else "
            "the newest in runs/."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="The weights: final, best or the step of a checkpoint of the run, RUN@STEP of another run, "
            "or a model folder. Default: the final model, else the newest checkpoint, else the run's model."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed; the continuations get different ones from it.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Sampling temperature; default: as the episode was sampled."),
    ] = None,
    only_turn: Annotated[
        bool, typer.Option("--only-turn", help="Sample the turn alone, without the agent.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="The configuration that names the agent; default: the run's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the forks; default: forks/ in the folder of the run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sample a recorded turn again, from its exact tokens, and let the agent go on from there.

    The agent repeats its calls before the turn with the recorded replies. A call that differs from the
    recorded one ends the fork, and is shown. The exit status is 1 if every continuation failed.
    """
    require("torch", "the embedded engine")
    from areal_agents.config import load_config
    from areal_agents.inspection.fork_table import print_forks
    from areal_agents.inspection.forks import forked_turn, forks_folder
    from areal_agents.inspection.runs import chosen_run
    from areal_agents.inspection.sources import stored
    from areal_agents.launch.fork import Resampling, weights_of
    from areal_agents.launch.fork import fork as play
    from areal_agents.launch.run_folder import RunFolder

    place = run if run is not None else chosen_run()
    own = place / "config.yaml"
    if config is None and not own.is_file():
        raise ConfigError(f"{place} has no configuration; name that of the agent with --config")
    loaded = load_config(config or own, overrides or (), weights=False)
    with stored(str(place)) as (store, _):
        forked = forked_turn(store, episode, turn)
    weights, version = weights_of(place, policy, loaded)
    console = Console(stderr=True, highlight=False)
    found = play(
        loaded,
        forked,
        weights,
        version,
        Resampling(count, seed, temperature, only_turn),
        out=RunFolder(out.resolve()) if out is not None else forks_folder(place),
        say=lambda text: console.print(text, markup=False),
    )
    if as_json:
        print(json.dumps({**asdict(found), "mean_score": found.mean_score}))
    else:
        print_forks(found, Console(highlight=False, width=None if sys.stdout.isatty() else 200))
    if all(c.error is not None for c in found.continuations):
        raise typer.Exit(1)
