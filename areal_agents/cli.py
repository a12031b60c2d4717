"""The `areal-agents` command. Each command imports what it needs when it is called."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from areal_agents.errors import ArealAgentsError
from areal_agents.launch.signals import Interrupted

if TYPE_CHECKING:
    from areal_agents.inference.config import EmbeddedEngineConfig

app = typer.Typer(
    help="Train the agents you already have, with fully asynchronous decoupled PPO.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

ConfigPath = Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides, for example trainer.steps=10.", metavar="[KEY=VALUE]..."),
]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set an earlier run aside and begin anew.")] = False,
    ablate_tool: Annotated[
        bool, typer.Option("--ablate-tool", help="Afterwards, evaluate with the agent's tool switched off.")
    ] = False,
) -> None:
    """Train an agent: starts engine, proxy, rollouts and trainer, and ends them all."""
    from areal_agents.config import load_config
    from areal_agents.launch.train import train as run

    console = Console()
    try:
        run(load_config(config, overrides or ()), console=console, fresh=fresh, ablate_tool=ablate_tool)
    except Interrupted:
        command = shlex.join(["areal-agents", "train", str(config), *(overrides or ())])
        console.print(f"to go on from the last checkpoint: {command}", soft_wrap=True, highlight=False)
        raise


@app.command("eval")
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="Weights to evaluate; default: the config's model.")
    ] = None,
    ablate_tool: Annotated[
        bool, typer.Option("--ablate-tool", help="Use the config's `ablation` agent.")
    ] = False,
) -> None:
    """Evaluate a model on the held-out tasks of a config."""
    from areal_agents.config import load_config
    from areal_agents.launch.train import evaluate as run

    console = Console()
    changes = [*(overrides or ()), *([f"model={model.resolve()}"] if model else [])]
    loaded = load_config(config, changes)
    score = run(loaded, console=console, ablate_tool=ablate_tool)
    console.print(f"held-out reward of {loaded.model}: [bold]{score:.3f}[/bold]")


@app.command()
def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="More settings of the proxy, for example durability=batched.", metavar="[KEY=VALUE]..."
        ),
    ] = None,
    *,
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the model.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one, another at each start.")
    ] = 8000,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            help="A running SGLang, once for each replica; without one an embedded engine is started."
        ),
    ] = None,
    router_url: Annotated[
        str, typer.Option(help="A router before the engines that generation goes through (sglang-router).")
    ] = "",
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="Key of the control API; may be absent on loopback only.", envvar="AREAL_AGENTS_ADMIN_KEY"
        ),
    ] = None,
    store: Annotated[Path, typer.Option(help="Where episodes are kept.")] = Path("runs/serve/store.db"),
    family: Annotated[
        str, typer.Option(help="Chat template family; auto reads the model's config.json.")
    ] = "auto",
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="The log on standard error: text, or JSON lines.")
    ] = "text",
    log_calls: Annotated[bool, typer.Option("--log-calls", help="Log every model call.")] = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Proxy processes on one store; each episode is kept by one of them.")
    ] = 1,
) -> None:
    """Serve a model to agents and record every call token by token."""
    from areal_agents.config import proxy_config

    config = proxy_config(
        settings or (),
        host=host,
        port=port,
        admin_key=admin_key,
        family=family,
        log_format=log_format,
        log_calls=log_calls,
    )
    urls = tuple(engine_url or ())
    if workers == 1:
        from areal_agents.proxy.server import serve as run

        run(model, config, store=store, engine_urls=urls, router_url=router_url)
    else:
        from areal_agents.proxy.workers.supervisor import serve_workers

        serve_workers(model, config, workers=workers, store=store, engine_urls=urls, router_url=router_url)


@app.command()
def engine(
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the model.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 takes all cores.")] = 0,
    slots: Annotated[int, typer.Option(help="Sequences whose keys and values are kept.")] = 64,
    max_context: Annotated[
        int, typer.Option(help="Longest prompt plus completion; 0 takes the model's.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    kernel: Annotated[str, typer.Option(help="auto, numba or torch.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of requests that bring none.")] = 0,
) -> None:
    """Start the embedded engine, which speaks SGLang's native protocol."""
    from areal_agents.inference.embedded.server import serve as run

    run(
        _engine_config(
            model=str(model), host=host, port=port, threads=threads, slots=slots, max_context=max_context,
            dtype=dtype, device=device, kernel=kernel, seed=seed,
        )
    )  # fmt: skip


@app.command()
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The agent's command, after --.", metavar="[-- COMMAND...]"),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="module:function or file.py:function, instead of a command.")
    ] = None,
    task: Annotated[str, typer.Option(help="What the agent is given, as a JSON object.")] = "{}",
    model: Annotated[
        Path | None, typer.Option(help="Model folder, for its template; default: a small stand-in.")
    ] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="A running SGLang to answer; default: a script.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which the agent is ended.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Last line: one JSON object.")] = False,
) -> None:
    """Run one episode of your agent, and report what prevents training it."""
    import orjson

    from areal_agents.doctor import examine, read_task, show

    report = examine(
        function=agent, command=command or (), task=read_task(task), model=model,
        engine_url=engine_url, timeout_s=timeout,
    )  # fmt: skip
    show(report, Console(soft_wrap=True))
    if as_json:
        print(orjson.dumps(report.to_dict()).decode())
    if report.verdict == "cannot":
        raise typer.Exit(1)


@app.command("export")
def export_model(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run's folder (its latest checkpoint), or a checkpoint.", metavar="RUN_OR_CHECKPOINT"
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.", metavar="OUT")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: that of the initial model.")
    ] = None,
) -> None:
    """Write a checkpoint as a plain Hugging Face folder, adapters merged."""
    from areal_agents.training.checkpoint.export import export

    checkpoint = export(source, out, dtype=dtype)
    Console().print(f"{checkpoint} is now a model in {out}", soft_wrap=True, highlight=False)


@app.command()
def verify(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run that is under way.", metavar="RUN")],
) -> None:
    """Compare the weights that a run's engines hold with those that were published, by their checksums."""
    from areal_agents.launch.verify import run

    if not run(run_dir, Console(soft_wrap=True, highlight=False)):
        raise typer.Exit(1)


@app.command()
def simulate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Parameters, for example max_staleness=8 tokens.mean=2048.", metavar="[KEY=VALUE]..."
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A run's folder, whose times and lengths are taken.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=2, help="To be shared out; default: as many as the parameters have.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG to draw it in.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Last line: one JSON object.")] = False,
) -> None:
    """Size a cluster: simulate the loop on other numbers of GPUs, and under other bounds on staleness."""
    from areal_agents.simulate.report import run

    run(overrides or (), source=source, gpus=gpus, plot=plot, json=as_json)


def _engine_config(**options: object) -> EmbeddedEngineConfig:
    from pydantic import ValidationError

    from areal_agents.errors import ConfigError
    from areal_agents.inference.config import EmbeddedEngineConfig

    try:
        return EmbeddedEngineConfig.model_validate(options)
    except ValidationError as error:
        faults = (
            f"--{str(f['loc'][0]).replace('_', '-') if f['loc'] else ''}: {f['msg']}" for f in error.errors()
        )
        raise ConfigError("; ".join(faults)) from None


def main() -> None:
    """The entry point of the `areal-agents` command."""
    run_app(app)


def run_app(commands: typer.Typer) -> None:
    """Run a command line. An expected error is one clear message and exit code 1, never a stack trace."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        commands(standalone_mode=True)
    except ArealAgentsError as error:
        console.print(f"[bold red]{type(error).__name__}[/bold red]: {escape(str(error))}", highlight=False)
        raise SystemExit(1) from None
    except Interrupted:
        console.print("stopped; everything has been ended")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
