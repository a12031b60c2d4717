"""The commands `areal-agents online …`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from areal_agents.errors import ConfigError

if TYPE_CHECKING:
    from areal_agents.launch.run_folder import RunFolder
    from areal_agents.store import Store

Run = Annotated[Path, typer.Argument(help="The folder of a run with data.traffic.", metavar="RUN")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    online = typer.Typer(
        help="See and steer a run that trains on the conversations of its users.", no_args_is_help=True
    )
    for command in (status, freeze, unfreeze, promote, rollback, delete):
        online.command()(command)
    app.add_typer(online, name="online")


def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show which versions are served, how the candidate compares, and what became of earlier ones."""
    from areal_agents.online.status import read_status, rules_of

    folder, store = _opened(run)
    with store:
        _, rules = rules_of(folder)
        found = read_status(store, rules)
    if as_json:
        print(json.dumps(found.as_dict(rules)))
        return
    for line in found.lines(rules):
        _console().print(line)


def freeze(run: Run) -> None:
    """Train, publish and decide nothing until `unfreeze`; serving and recording go on.

    A step that is being trained is finished.
    """
    _, store = _opened(run)
    with store:
        store.freeze(True)
    _console().print("frozen; areal-agents online unfreeze lets it go on")


def unfreeze(run: Run) -> None:
    """Undo `freeze`."""
    _, store = _opened(run)
    with store:
        store.freeze(False)
    _console().print("no longer frozen")


def promote(run: Run) -> None:
    """Serve the candidate to everybody, whatever the comparison says."""
    _order(run, "promote")


def rollback(run: Run) -> None:
    """End the candidate and train on from the version before it, whatever the comparison says."""
    _order(run, "roll_back")


def delete(
    run: Run,
    episode: Annotated[
        list[str] | None, typer.Option(help="The id of an episode; may be given several times.")
    ] = None,
    user: Annotated[str, typer.Option(help="The name that the header X-Episode-User gave.")] = "",
) -> None:
    """Delete conversations from the store, with everything that was recorded of them.

    What the weights have learned from them stays.
    """
    from areal_agents.launch.run_folder import RunFolder
    from areal_agents.online.deletion import delete as delete_conversations
    from areal_agents.online.status import rules_of

    if not episode and not user:
        raise typer.BadParameter("give --episode or --user")
    folder = RunFolder(run)
    config, _ = rules_of(folder)
    deleted = delete_conversations(folder, config, episodes=episode or (), user=user)
    _console().print(f"deleted {len(deleted)} conversations")


def _order(run: Path, order: str) -> None:
    _, store = _opened(run)
    with store:
        served = store.served_versions()
        candidate = None if served is None else served.candidate
        if candidate is None:
            raise ConfigError("no version is a candidate now, so there is nothing to decide")
        store.give_order(candidate.version, "promote" if order == "promote" else "roll_back")
    _console().print(
        f"ordered for version {candidate.version}: {order.replace('_', ' ')}; the trainer carries it out, "
        "within seconds if it is running"
    )


def _opened(run: Path) -> tuple[RunFolder, Store]:
    """Return the folder of a run and its store, which the caller closes. Raises ConfigError."""
    from areal_agents.launch.run_folder import RunFolder
    from areal_agents.online.status import rules_of
    from areal_agents.store import Store
    from areal_agents.store.read_only import ReadOnlyStore

    folder = RunFolder(run)
    config, _ = rules_of(folder)
    store = folder.store_at(config.store.url)
    if not ReadOnlyStore(store).exists():  # opening it would create it
        raise ConfigError(f"{run} has no store yet: start it with areal-agents train")
    return folder, Store.open(store, config.store.durability)


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False)
