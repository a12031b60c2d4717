"""The commands that show runs in a browser and to coding agents: `view` and `mcp`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from areal_agents.extras import require
from areal_agents.secret_variables import ADMIN_KEY


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to a command line."""
    for command in (view, mcp):
        app.command()(command)


def view(
    place: Annotated[
        Path,
        typer.Argument(help="A folder that has runs, the folder of a run, or a store file.", metavar="WHERE"),
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 chooses a free one.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    key: Annotated[
        str | None,
        typer.Option(
            help="Key that a reader must give; required unless --host is a loopback address.",
            envvar=ADMIN_KEY,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model, for its tokenizer, of stores whose run does not name it or lacks it: a folder, "
            "quickstart, or a model of the Hugging Face Hub."
        ),
    ] = None,
) -> None:
    """Show runs in a browser: curves, timelines, groups, episodes and every token. Nothing is changed."""
    from areal_agents.view.server import serve

    with contextlib.suppress(KeyboardInterrupt):
        serve(
            place,
            host=host,
            port=port,
            key=key,
            model=model,
            announce=lambda url: print(f"runs of {place} are shown at {url}/ (Ctrl-C ends it)", flush=True),
        )


def mcp(
    place: Annotated[
        Path,
        typer.Argument(help="A folder that has runs, the folder of a run, or a store file.", metavar="WHERE"),
    ] = Path("runs"),
) -> None:
    """Serve runs to a coding agent, as an MCP server on standard input and output. Nothing is changed."""
    require("mcp", "the MCP server")
    from areal_agents.view.mcp_server import server_of
    from areal_agents.view.runs import Runs

    server_of(Runs(place)).run("stdio")
