"""The `areal-agents` command line. Each command imports what it needs when it is called."""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.evaluation import commands as evaluation_commands
from areal_agents.extras import require
from areal_agents.inspection import commands as inspection_commands
from areal_agents.launch.signals import Interrupted
from areal_agents.online import commands as online_commands
from areal_agents.process_control import collect_seldom
from areal_agents.rerun import commands as rerun_commands
from areal_agents.secret_variables import ADMIN_KEY, given_engine_key
from areal_agents.version import __version__
from areal_agents.view import commands as view_commands

if TYPE_CHECKING:
    from areal_agents.inference.config import EmbeddedEngineConfig

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look up configuration keys.", no_args_is_help=True)
app.add_typer(config_app, name="config")
inspection_commands.add_commands(app)
evaluation_commands.add_commands(app)
rerun_commands.add_commands(app)
view_commands.add_commands(app)
online_commands.add_commands(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"areal-agents {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Train the agents you already have, with fully asynchronous decoupled PPO."""


ConfigPath = Annotated[Path, typer.Argument(help="The YAML configuration file of the run.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings that override the file, for example trainer.steps=10.", metavar="KEY=VALUE"
    ),
]

Model = Annotated[str, typer.Option(help="Hugging Face folder of the model, its Hub id, or quickstart.")]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set an earlier run aside and start from the beginning.")
    ] = False,
    ablate_tool: Annotated[
        bool,
        typer.Option("--ablate-tool", help="After training, evaluate the config's `ablation` agent too."),
    ] = False,
    launcher: Annotated[
        str,
        typer.Option(
            help="Place the processes on the machines of a cluster: local, ray, slurm, kubernetes, skypilot, "
            "or external, which waits for processes that something else starts.",
            metavar="NAME",
        ),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Start nothing, check that agent, reward and tasks can be loaded, and print the "
            "configuration with the origin of each value, and the job of an episode if jobs run the agent. "
            "With --launcher slurm it is the job of the run, and with kubernetes or skypilot what these get.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show only what is unusual, and the results.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write what happens as JSON, one object for each line.")
    ] = False,
) -> None:
    """Train an agent: start the engine, proxy, rollout and trainer processes, and end them with the run."""
    if launcher in ("kubernetes", "skypilot"):
        from areal_agents.cluster.launchers.rendered import render, submit

        options = {"--fresh": fresh, "--ablate-tool": ablate_tool, "--quiet": quiet, "--json": as_json}
        for option in (option for option, given in options.items() if given):
            raise typer.BadParameter(f"{option} does not reach the supervisor of --launcher {launcher}")
        rendered = render(launcher, config, overrides or ())
        if dry_run:
            print(rendered.text, end="")
        else:
            submit(rendered)
        return
    if dry_run and launcher != "slurm":
        from areal_agents.cluster.start import described

        print(described(config, overrides or (), launcher), end="")
        return
    if quiet and as_json:
        raise typer.BadParameter("--quiet and --json are two forms of the same output; give one of them")
    require("torch", "training")
    from areal_agents import telemetry
    from areal_agents.cluster.start import start_on_cluster
    from areal_agents.config import load_config
    from areal_agents.launch.joining import join
    from areal_agents.launch.nodes import nodes_of
    from areal_agents.launch.report.report import Form
    from areal_agents.launch.run_folder import RunFolder
    from areal_agents.launch.train import train as run

    console = Console(stderr=as_json)
    loaded = load_config(config, overrides or ())
    telemetry.check(loaded.telemetry)
    form: Form = "json" if as_json else "quiet" if quiet else "auto"
    try:
        if launcher:
            if ablate_tool:
                raise typer.BadParameter("--ablate-tool is for runs without --launcher")
            arguments = [str(config), *(overrides or ()), f"--launcher={launcher}"]
            options = {"--fresh": fresh, "--quiet": quiet, "--json": as_json}
            arguments += [option for option, given in options.items() if given]
            start_on_cluster(
                launcher, loaded, arguments, console=console, fresh=fresh, form=form, dry_run=dry_run
            )
            return
        nodes = nodes_of(loaded.trainer, os.environ)
        if nodes.rank:
            join(loaded, nodes, console=console, fresh=fresh)
        else:
            run(loaded, console=console, fresh=fresh, ablate_tool=ablate_tool, form=form)
    except Interrupted:
        has_checkpoint = RunFolder(Path(loaded.run_dir)).checkpoint_step is not None
        since = " from the last checkpoint" if has_checkpoint else ""
        placed = ["--launcher", launcher] if launcher else []
        command = shlex.join(["areal-agents", "train", str(config), *(overrides or ()), *placed])
        console.print(f"to continue{since}: {command}", soft_wrap=True, highlight=False)
        raise


@app.command()
def role(
    role: Annotated[
        Literal["engine", "proxy", "rollout", "sandbox", "trainer"],
        typer.Argument(help="What the process does."),
    ],
    run: Annotated[str, typer.Option(help="The URL of the run's store, which has its configuration.")],
    index: Annotated[int, typer.Option(min=0, help="The number of the process among those of its role.")] = 0,
    host: Annotated[
        str,
        typer.Option(
            help="The address or the name at which the other machines reach this one; default: the address "
            "from which this machine reaches the store."
        ),
    ] = "",
    port: Annotated[int, typer.Option(min=0, help="The port of its server; 0: one that is free.")] = 0,
    run_dir: Annotated[
        str, typer.Option(help="The run folder on this machine; default: run_dir of the configuration.")
    ] = "",
) -> None:
    """Run one process of a run on several machines, as a launcher starts it (train --launcher)."""
    if role != "sandbox":
        require("torch", "training")
    from areal_agents.cluster.role import run_role
    from areal_agents.launch.processes import with_logging

    with_logging(f"{role}-{index}")
    raise typer.Exit(run_role(role, index, run, host=host, port=port, run_dir=run_dir))


@app.command()
def processes(
    role: Annotated[Literal["trainer"], typer.Argument(help="The part of the run: trainer.")],
    folder: Annotated[Path, typer.Option(help="The folder of the run, which all machines share.")],
) -> None:
    """Run one rank of a trainer, as torchrun, srun or Ray start it, with the run folder's configuration."""
    require("torch", "training")
    from areal_agents.launch.processes import main as run

    raise typer.Exit(run([role, "--folder", str(folder)]))


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Number of GPUs of a machine that is not here; default: those of this one."),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, help="Memory of each of these GPUs, in GiB; default: 80.")
    ] = None,
) -> None:
    """Show the memory that a run needs on each GPU, and what would help if it is too much.

    Of the model only config.json is needed. The exit status is 1 if the run does not fit, and 3 if the memory
    of its model is not known.
    """
    require("torch", "the plan")
    from areal_agents.config import load_config
    from areal_agents.launch.gpus import Machine, this_machine
    from areal_agents.launch.plan import ELSEWHERE, EXIT_UNKNOWN, plan_memory
    from areal_agents.training.memory.estimate import MemoryUnknown

    if gpus is None and gpu_memory is not None:
        raise typer.BadParameter("--gpu-memory describes the GPUs of --gpus; give their number, too")
    machine = this_machine() if gpus is None else Machine(gpus, round((gpu_memory or 80.0) * 2**30))
    loaded = load_config(config, overrides or (), weights=False)
    try:
        found = plan_memory(loaded, machine)
    except MemoryUnknown as error:
        Console().print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_UNKNOWN) from None
    found.show(Console())
    if not machine.gpus:
        text = f"This machine has no GPU. {ELSEWHERE}."
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
    if not found.fits:
        raise typer.Exit(1)


@app.command()
def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Further settings of the proxy, for example durability=batched.", metavar="KEY=VALUE"
        ),
    ] = None,
    *,
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 chooses a free port at each start.")] = 8000,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a running SGLang server; repeat for each replica. Default: the embedded engine."
        ),
    ] = None,
    router_url: Annotated[
        str,
        typer.Option(
            help="URL of a router (sglang-router) in front of the engines; generation requests go through it."
        ),
    ] = "",
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="Key of the control API; required unless --host is a loopback address.",
            envvar=ADMIN_KEY,
        ),
    ] = None,
    store: Annotated[Path, typer.Option(help="SQLite file that stores the episodes.")] = Path(
        "runs/serve/store.db"
    ),
    family: Annotated[
        str, typer.Option(help="Family of the chat template; auto: read it from the model's config.json.")
    ] = "auto",
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="Format of the log on standard error: text, or JSON lines."),
    ] = "text",
    log_calls: Annotated[
        bool, typer.Option("--log-calls", "-v", help="Log every model call, without its messages.")
    ] = False,
    split: Annotated[
        Literal["train", "eval"],
        typer.Option(
            help="Split of the episodes that calls open by themselves. train: sampling parameters are "
            "pinned, so that the episodes can be trained on. eval: agents choose them."
        ),
    ] = "train",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of proxy processes; they share one store, and each episode belongs to one of them. "
            "Default: one for every two engines, and at most one for every 4 cores.",
        ),
    ] = None,
) -> None:
    """Serve a model to agents and record every call token by token."""
    from areal_agents.config import proxy_config
    from areal_agents.config.models import model_folder
    from areal_agents.model_folder import folder_fault

    folder = model_folder(model, Path.cwd())
    if fault := folder_fault(folder):
        raise ConfigError(f"--model: {fault}")
    config = proxy_config(
        settings or (),
        host=host,
        port=port,
        admin_key=admin_key,
        family=family,
        log_format=log_format,
        log_calls=log_calls,
        implicit_split=split,
    )
    urls = tuple(engine_url or ())
    if not urls:
        require("torch", "the embedded engine")
    from areal_agents.inference.config import SGLANG_SEQUENCES
    from areal_agents.proxy.page import Page, new_view_key
    from areal_agents.proxy.workers.supervisor import serve_with_workers
    from areal_agents.view.mounted import FACTORY

    if workers is not None:
        config = config.model_copy(update={"workers": workers})
    config = config.for_engines(SGLANG_SEQUENCES * max(1, len(urls)))
    page = Page(FACTORY, str(store), str(folder), key=new_view_key(), is_announced=True)
    serve_with_workers(
        folder,
        config,
        store=store,
        engine_urls=urls,
        router_url=router_url,
        engine_key=given_engine_key(),
        page=page,
    )


@app.command()
def engine(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    threads: Annotated[int, typer.Option(help="Number of CPU threads; 0 uses all cores.")] = 0,
    slots: Annotated[
        int, typer.Option(help="Number of sequences whose keys and values are kept in memory.")
    ] = 64,
    max_context: Annotated[
        int,
        typer.Option(
            help="Most tokens of a prompt plus its completion; 0 uses the model's limit, up to 4096."
        ),
    ] = 0,
    dtype: Annotated[str, typer.Option(help="Compute type: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Device to run on: cpu, cuda or cuda:N.")] = "cpu",
    kernel: Annotated[
        str, typer.Option(help="auto, numba or torch; auto: numba for float32 on a CPU, torch otherwise.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed for requests that carry none.")] = 0,
) -> None:
    """Serve a model with the embedded engine, which speaks SGLang's native protocol."""
    require("torch", "the embedded engine")
    from areal_agents.config.models import model_folder
    from areal_agents.inference.embedded.server import serve as run

    folder = model_folder(model, Path.cwd())
    run(
        _engine_config(
            model=folder, host=host, port=port, threads=threads, slots=slots, max_context=max_context,
            dtype=dtype, device=device, kernel=kernel, seed=seed,
        ),
        key=given_engine_key(),
    )  # fmt: skip


@app.command()
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The agent's command line, after `--`.", metavar="-- COMMAND"),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(help="The agent as module:function or file.py:function, instead of a command."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="The task to give the agent, as a JSON object; default: {}, or the first task of a "
            "configuration whose agent is examined."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="A reward function apart from the agent: module:function or file.py:function."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of the model whose chat template to use; default: a built-in one."
        ),
    ] = None,
    engine_url: Annotated[
        str | None,
        typer.Option(
            help="URL of a running SGLang server that answers the agent; default: scripted answers."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A run's configuration, whose proxy.volatile is applied and whose agent is examined if no "
            "other is given; with --rewards, whose rewards are examined."
        ),
    ] = None,
    rewards: Annotated[
        bool,
        typer.Option(
            "--rewards", help="Examine the rewards of --config instead: what is earned without the work."
        ),
    ] = False,
    tasks: Annotated[int, typer.Option(min=1, help="With --rewards: most tasks that are played.")] = 8,
    answer: Annotated[
        str | None, typer.Option(help="With --rewards: the field of a task that holds its answer.")
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="Time limit of the agent, in seconds; that of a configuration whose agent is examined holds "
            "if it is shorter.",
        ),
    ] = 120.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Also print the report as one JSON object, on the last line.")
    ] = False,
) -> None:
    """Run one episode of your agent, and report what prevents or impairs training it.

    With --rewards, play tasks of a configuration with policies that do none of the work, and report what they
    earn.
    """
    if rewards:
        if config is None or command or agent or reward:
            raise typer.BadParameter(
                "--rewards takes the agent and its rewards from --config, as they are in the file"
            )
        _doctor_of_rewards(config, tasks=tasks, answer=answer, timeout_s=timeout, as_json=as_json)
        return
    import orjson

    from areal_agents.config import load_config
    from areal_agents.config.models import model_folder
    from areal_agents.doctor import examine, read_task
    from areal_agents.doctor.show import show
    from areal_agents.launch.examined import agent_of_run
    from areal_agents.launch.signals import interruptible

    loaded = load_config(config, weights=False) if config else None
    given: dict[str, Any] = {"function": agent, "command": command or (), "reward": reward}
    told = read_task(task) if task is not None else None
    if loaded is not None and agent is None and not command:
        given, first = agent_of_run(loaded)
        given |= {"reward": reward or given["reward"]}
        told = first if told is None else told
        timeout = min(timeout, loaded.rollout.limits.time_s)
    with interruptible():
        report = examine(
            **given,
            task=told or {},
            model=Path(model_folder(model, Path.cwd())) if model else None,
            engine_url=engine_url,
            volatile=loaded.proxy.volatile if loaded is not None else {},
            timeout_s=timeout,
        )
    show(report, Console(soft_wrap=True))
    if as_json:
        print(orjson.dumps(report.to_dict()).decode())
    if report.verdict == "cannot":
        raise typer.Exit(1)


def _doctor_of_rewards(
    path: Path, *, tasks: int, answer: str | None, timeout_s: float, as_json: bool
) -> None:
    import orjson

    from areal_agents.config import load_config
    from areal_agents.doctor.rewards import examine_rewards, show_rewards
    from areal_agents.launch.signals import interruptible
    from areal_agents.rollout.data import load_tasks

    loaded = load_config(path, weights=False)
    progress = Console(stderr=True, soft_wrap=True)
    with interruptible():
        report = examine_rewards(
            load_tasks(loaded.data, seed=loaded.seed).epoch(0),
            most_tasks=tasks,
            agent=loaded.agent,
            reward=loaded.reward,
            limits=loaded.rollout.limits,
            proxy=loaded.proxy.model_copy(update={"admin_key": None, "project_keys": (), "port": 0}),
            group_size=loaded.rollout.group_size,
            answer_field=answer,
            timeout_s=timeout_s,
            say=lambda text: progress.print(text, markup=False, highlight=False),
        )
    show_rewards(report, Console(soft_wrap=True))
    if as_json:
        print(orjson.dumps(report.to_dict()).decode())
    if report.verdict == "cannot":
        raise typer.Exit(1)


@app.command("export")
def export_model(
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, or the folder of a run, whose latest checkpoint is exported.",
            metavar="RUN_OR_CHECKPOINT",
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write the model to.", metavar="OUT")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type of the weights: float32, bfloat16 or float16; default: that of the initial model."
        ),
    ] = None,
) -> None:
    """Write a checkpoint as a plain Hugging Face folder, with adapters merged."""
    from areal_agents.training.checkpoint.export import export

    checkpoint = export(source, out, dtype=dtype)
    Console().print(f"wrote {checkpoint} as a Hugging Face model to {out}", soft_wrap=True, highlight=False)


@app.command()
def verify(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a running run.", metavar="RUN")],
) -> None:
    """Compare the weights in a run's engines with the published weights, by checksum."""
    from areal_agents.launch.verify import run

    if not run(run_dir, Console(soft_wrap=True, highlight=False)):
        raise typer.Exit(1)


@app.command()
def simulate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Parameters of the simulation, for example max_staleness=8 tokens.mean=2048; inputs of the "
            "estimate with --scaling.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Folder of a run to take measured times and lengths from.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Number of GPUs to divide between engines and trainer; default: that of the parameters.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also write a plot to this PNG file.")] = None,
    scaling: Annotated[
        bool,
        typer.Option(
            "--scaling",
            help="Instead: an estimate of what 8, 64, 512 and 1,000 GPUs, or --gpus, would need of proxies, "
            "store and network, with its inputs.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Also print the report as one JSON object, on the last line.")
    ] = False,
) -> None:
    """Size a cluster: simulate training with other numbers of GPUs and other bounds on staleness."""
    if scaling:
        from areal_agents.simulate.scaling.tables import run as run_scaling

        if source is not None or plot is not None:
            raise ConfigError("--scaling has inputs of its own; leave --from and --plot out")
        run_scaling(overrides or (), gpus=gpus, json=as_json)
        return
    from areal_agents.simulate.report import run

    run(overrides or (), source=source, gpus=gpus, plot=plot, json=as_json)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The folder of the new project.", metavar="FOLDER")],
    framework: Annotated[
        str,
        typer.Option(
            help="What the agent is written with: openai, langgraph, openai-agents, pydantic-ai, anthropic, "
            "node, or command (a program without any package)."
        ),
    ] = "openai",
) -> None:
    """Write a starter project that can be trained as it is: an agent, tasks, a configuration and a test."""
    from areal_agents.starter import create_project

    missing = create_project(folder, framework).missing()
    lines = [f"wrote {folder}; next:", *([f"  {missing}"] if missing else [])]
    if find_spec("torch") is None:
        lines.append("  pip install 'areal-agents[train]'")
    lines += [f"  cd {shlex.quote(str(folder))}", "  areal-agents train config.yaml"]
    Console().print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


@app.command()
def skill(
    root: Annotated[
        Path, typer.Argument(help="The root of the repository of your agent.", metavar="ROOT")
    ] = Path("."),
    folder: Annotated[
        str, typer.Option(help="The folder of skills that your coding agent reads, below the root.")
    ] = ".claude/skills",
    replace: Annotated[bool, typer.Option("--replace", help="Replace a file that differs.")] = False,
) -> None:
    """Write a skill that teaches a coding agent to set up training in your repository."""
    from areal_agents.skill import install

    path = install(root, folder=folder, replace=replace)
    Console().print(f"wrote {path}", soft_wrap=True, highlight=False, markup=False)


@config_app.command()
def explain(
    key: Annotated[
        str, typer.Argument(help="A key, for example trainer.lr, or its last part: lr.", metavar="KEY")
    ],
) -> None:
    """Describe a configuration key: its values, its default, and what it sets."""
    from areal_agents.config.reference import explain_key

    console = Console(soft_wrap=True, highlight=False)
    for found in explain_key(key):
        console.print(f"[bold]{found.path}[/bold]")
        console.print(f"  {escape(found.description)}")
        console.print(f"  values:  {escape(found.type)}")
        if found.default or found.is_required:
            console.print(
                f"  default: {'none; it is required' if found.is_required else escape(found.default)}"
            )
        if found.needs:
            console.print(f"  needs:   {escape(', '.join(found.needs))}")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of a configuration file, for editors."""
    import json

    from areal_agents.config.reference import schema as json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@config_app.command()
def reference() -> None:
    """Print the reference of all configuration keys as Markdown."""
    from areal_agents.config.reference import markdown

    print(markdown(), end="")


def _engine_config(**options: object) -> EmbeddedEngineConfig:
    from pydantic import ValidationError

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
    collect_seldom()
    run_app(app)


def run_app(commands: typer.Typer) -> None:
    """Run a command line. An expected error prints one message, no stack trace, and exits with code 1."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        commands(standalone_mode=True)
    except ArealAgentsError as error:
        console.print(f"[bold red]{type(error).__name__}[/bold red]: {escape(str(error))}", highlight=False)
        raise SystemExit(1) from None
    except Interrupted:
        console.print("stopped; all processes have been ended")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
