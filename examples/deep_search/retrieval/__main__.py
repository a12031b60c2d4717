"""`python -m retrieval build CORPUS INDEX` and `python -m retrieval serve INDEX`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from areal_agents.errors import ArealAgentsError
from areal_agents.sockets import listen, url_of
from retrieval.index import Index, build_index
from retrieval.passages import Columns, read_corpus
from retrieval.server import build_app

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that the clients close them

app = typer.Typer(help="An index of passages, and its server.", no_args_is_help=True, add_completion=False)
Device = Annotated[str, typer.Option(help="Where embeddings are computed: cpu, cuda, …")]


@app.command()
def build(
    corpus: Annotated[Path, typer.Argument(help="The passages, .jsonl or .parquet.")],
    index: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    embedding_model: Annotated[
        str, typer.Option(help="A model folder or a name of the Hub, for dense retrieval; without it BM25.")
    ] = "",
    device: Device = "cpu",
    id_column: Annotated[str, typer.Option("--id", help="The column of the id.")] = "id",
    title: Annotated[str, typer.Option(help="The column of the title.")] = "title",
    text: Annotated[str, typer.Option(help="The column of the text.")] = "text",
    url: Annotated[str, typer.Option(help="The column of the URL.")] = "url",
) -> None:
    """Build the index of a corpus."""
    build_index(
        read_corpus(corpus, Columns(id_column, title, text, url)),
        index,
        embedding_model=embedding_model or None,
        device=device,
        report=print,
    )


@app.command()
def serve(
    index: Annotated[Path, typer.Argument(help="The folder of an index.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0: a free one.")] = 8100,
    device: Device = "cpu",
    timeout_s: Annotated[float, typer.Option(help="The longest time of a search in seconds.")] = 30.0,
) -> None:
    """Serve an index until SIGTERM or Ctrl-C."""
    opened = Index(index, device=device)
    app = build_app(opened, timeout_s=timeout_s)
    settings = uvicorn.Config(app, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S)
    with listen(host, port) as listener:
        print(f"{len(opened):,} passages ({', '.join(opened.modes)}) at {url_of(listener)}", flush=True)
        uvicorn.Server(settings).run(sockets=[listener])
    opened.close()


if __name__ == "__main__":
    try:
        app()
    except ArealAgentsError as error:
        raise SystemExit(f"error: {error}") from None
