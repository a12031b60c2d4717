"""The command `fork`, and what it prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_agents.errors import ConfigError
from areal_agents.extras import require
from areal_agents.inspection.forks import Continuation, Forks, Leaving
from areal_agents.inspection.show import printable

_REPLY = 60  # characters of a reply in the table


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
        draw_forks(found, Console(highlight=False, width=None if sys.stdout.isatty() else 200))
    if all(c.error is not None for c in found.continuations):
        raise typer.Exit(1)


def draw_forks(found: Forks, console: Console) -> None:
    """Print a table of continuations below the recorded one, and their mean score."""
    console.print(
        f"turn {found.turn} of {found.episode}, sampled again by {found.policy} at temperature "
        f"{found.temperature:g}",
        markup=False,
    )
    table = Table("", "turns", "tokens", "score", "logprob", "first difference", "reply")
    table.add_row(*_row(found.recorded, found.turn))
    for continuation in found.continuations:
        table.add_row(*_row(continuation, found.turn))
    console.print(table)
    console.print(
        f"each logprob is that of the weights that sampled the continuation: the recorded one's then, "
        f"{found.policy} now",
        style="dim",
        markup=False,
    )
    for continuation in found.continuations:
        if continuation.logprobs:
            console.print(_tokens(continuation))
    failed = [c for c in found.continuations if c.error is not None]
    for error in dict.fromkeys(c.error for c in failed):
        numbers = ", ".join(str(c.number) for c in failed if c.error == error)
        console.print(Text(f"continuation {numbers}: {printable(error or '')}", "red"))
    if found.mean_score is not None:
        console.print(
            f"mean score {found.mean_score:.3f} of {len(found.continuations) - len(failed)}, recorded "
            f"{_number(found.recorded.score)}"
        )
    console.print(f"in {found.store}", markup=False, soft_wrap=True)


def _row(continuation: Continuation, turn: int) -> list[Text]:
    leaves = "" if continuation.number == 0 else _leaves(continuation.leaves, turn)
    reply = printable(continuation.reply).replace("\n", " ")
    if continuation.error is not None and continuation.number:
        leaves = "failed"
    return [
        Text(str(continuation.number or "recorded")),
        Text(str(continuation.turns)),
        Text(str(continuation.tokens)),
        Text(_number(continuation.score)),
        Text("–" if continuation.logprob is None else f"{continuation.logprob:.2f}"),
        Text(leaves),
        Text(reply[:_REPLY] + ("…" if len(reply) > _REPLY else "")),
    ]


def _leaves(leaves: Leaving | None, turn: int) -> str:
    if leaves is None:
        return "none"
    if leaves.token is None:
        return f"turn {leaves.turn}"
    return f"token {leaves.token}" if leaves.turn == turn else f"turn {leaves.turn}, token {leaves.token}"


def _tokens(continuation: Continuation) -> Text:
    """Return the tokens of the turn, each with its logprob."""
    out = Text(f"{continuation.number}: ", "cyan")
    for text, logprob in continuation.logprobs:
        out.append(printable(text).replace("\n", "↵")).append(f" {logprob:.2f}  ", "dim")
    return out


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
