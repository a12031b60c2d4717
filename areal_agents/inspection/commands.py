"""The commands that look at runs and episodes, and at what has been recorded of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.console import Console

from areal_agents.errors import ConfigError
from areal_agents.inspection.fork_command import fork
from areal_agents.secret_variables import ADMIN_KEY

if TYPE_CHECKING:
    from areal_agents.inspection.export import Format

Where = Annotated[
    str,
    typer.Argument(
        help="A run's folder, a store file, or the URL of a store in PostgreSQL or of a proxy.",
        metavar="WHERE",
    ),
]
AdminKey = Annotated[str | None, typer.Option(help="Admin key of the proxy.", envvar=ADMIN_KEY)]
Split = Annotated[Literal["train", "eval"] | None, typer.Option(help="Only episodes of this split.")]
Status = Annotated[
    Literal["open", "finished", "truncated", "failed", "aborted"] | None,
    typer.Option(help="Only episodes with this status."),
]
Group = Annotated[str | None, typer.Option(help="Only episodes of this group.")]
Task = Annotated[str | None, typer.Option(help="Only episodes of the task with this id.")]
MinReward = Annotated[float | None, typer.Option(help="Only episodes with at least this score.")]
MaxReward = Annotated[float | None, typer.Option(help="Only episodes with at most this score.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

episodes_app = typer.Typer(help="Look at recorded episodes.", no_args_is_help=True)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to a command line."""
    app.add_typer(episodes_app, name="episodes")
    for command in (runs, tasks, reward, replay, fork, tail, diagnose, compare, reference, why):
        app.command()(command)


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder that has the runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first."""
    from areal_agents.inspection.runs import list_runs
    from areal_agents.inspection.show import runs_table

    found = list_runs(folder)
    if as_json:
        print(json.dumps(found))
    elif found:
        _console().print(runs_table(found))
        for run in found:
            if run["problem"]:
                _console().print(
                    f"{run['name']}: {run['problem']}", style="red", soft_wrap=True, markup=False
                )
    else:
        print(f"no runs in {folder}")


def tasks(
    where: Annotated[str, typer.Argument(help="A run's folder, or a store file.", metavar="RUN")],
    *,
    pool: Annotated[
        Literal["new", "learnable", "unsolved", "solved"] | None,
        typer.Option(help="Only tasks of this pool, by their latest complete group."),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Only tasks of this data source or environment, by its name.")
    ] = None,
    sort: Annotated[
        Literal["begun", "task", "pool", "attempts", "reward", "last", "solved", "version"],
        typer.Option(
            help="begun: the newest last; task and pool by name; any other: the largest first, tasks without "
            "a value last."
        ),
    ] = "begun",
    limit: Annotated[
        int, typer.Option(min=1, help="Most tasks to show: the first, and with --sort begun the newest.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what training has seen of each task: attempts, rewards, and its pool by difficulty."""
    from dataclasses import asdict

    from areal_agents.inspection.show import tasks_table
    from areal_agents.inspection.sources import stored
    from areal_agents.inspection.tasks import ordered, pool_sizes, statistics_of

    with stored(where) as (store, config):
        every = statistics_of(store, config)
    of_source = [one for one in every if source is None or one.task.startswith(f"{source}/")]
    found = ordered([one for one in of_source if pool in (None, one.pool)], sort)
    shown = found[-limit:] if sort == "begun" else found[:limit]
    if as_json:
        print(json.dumps([asdict(one) for one in shown]))
        return
    _console().print(tasks_table(shown))
    sizes = ", ".join(f"{count} {name}" for name, count in pool_sizes(of_source).items())
    print(f"{len(of_source)} tasks were begun: {sizes}")
    if len(found) > limit:
        print(f"{limit} of {len(found)} tasks are shown; --limit shows more")


@episodes_app.command("ls")
def list_episodes(
    where: Where,
    *,
    split: Split = None,
    status: Status = None,
    group: Group = None,
    task: Task = None,
    min_reward: MinReward = None,
    max_reward: MaxReward = None,
    limit: Annotated[int, typer.Option(min=1, help="Most episodes to show, of the newest.")] = 50,
    as_json: AsJson = False,
    admin_key: AdminKey = None,
) -> None:
    """List episodes, the oldest first."""
    from areal_agents.inspection.show import episodes_table
    from areal_agents.inspection.sources import matching, opened

    with opened(where, admin_key) as source:
        found = source.list(split=split, status=status, group=group)
    found = matching(found, task=task, min_reward=min_reward, max_reward=max_reward)
    if as_json:
        print(json.dumps(found[-limit:]))
        return
    _console().print(episodes_table(found[-limit:]))
    if len(found) > limit:
        print(f"the newest {limit} of {len(found)} episodes; --limit shows more")


@episodes_app.command("show")
def show_episode(
    episode: Annotated[str, typer.Argument(help="The id of the episode.", metavar="ID")],
    where: Where,
    full: Annotated[bool, typer.Option("--full", help="Do not cut long messages.")] = False,
    as_json: AsJson = False,
    admin_key: AdminKey = None,
) -> None:
    """Show an episode: its conversations with their branches, rewards and versions, and why it forked."""
    from areal_agents.inspection.show import draw_episode
    from areal_agents.inspection.sources import opened

    with opened(where, admin_key) as source:
        found = source.get(episode)
    if as_json:
        import orjson

        print(orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY).decode())
    else:
        draw_episode(found, _console(), full=full)


@episodes_app.command("export")
def export_episodes(
    where: Where,
    out: Annotated[
        Path,
        typer.Argument(help="The file; for sft, pairs and atif a folder that does not exist.", metavar="OUT"),
    ],
    *,
    form: Annotated[
        Literal["jsonl", "parquet", "messages", "sft", "pairs", "atif", "openenv"] | None,
        typer.Option(
            "--format",
            help="The format (docs/inspecting.md); default: jsonl or parquet, by the ending of OUT.",
        ),
    ] = None,
    split: Annotated[
        Literal["train", "eval", "all"] | None,
        typer.Option(
            help="Only episodes of this split; default: train for messages, sft and pairs, otherwise all."
        ),
    ] = None,
    status: Status = None,
    group: Group = None,
    task: Task = None,
    min_reward: MinReward = None,
    max_reward: MaxReward = None,
    admin_key: AdminKey = None,
) -> None:
    """Write episodes in the form that another program reads."""
    from areal_agents.inspection.export import export, split_of
    from areal_agents.inspection.sources import matching, opened

    chosen = form or {".jsonl": "jsonl", ".parquet": "parquet"}.get(out.suffix)
    if chosen is None:
        raise ConfigError(f"{out} ends in neither .jsonl nor .parquet; give the format with --format")
    form_of_out = cast("Format", chosen)
    with opened(where, admin_key) as source:
        found = source.list(split=split_of(form_of_out, split), status=status, group=group)
        found = matching(found, task=task, min_reward=min_reward, max_reward=max_reward)
        written = export(found, source.get, out, form_of_out)
    print(f"wrote {written.what} to {out}")
    if written.held_out and split is None:
        _say(
            f"{written.held_out} of these {written.what} are of held-out tasks (split eval), which are no "
            "training data; --split train leaves them out"
        )


@episodes_app.command("import")
def import_episodes(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files, folders of ATIF files, or the folder of a collection.", metavar="FILE…"),
    ],
    *,
    into: Annotated[
        str, typer.Option("--into", help="A store file, which may be new, or the folder of a run.")
    ],
    form: Annotated[
        Literal["messages", "atif", "collection"] | None,
        typer.Option(
            "--format",
            help="messages: JSON lines as for fine-tuning at OpenAI; atif: trajectories of Harbor; "
            "collection: what `collect` or `eval` has played with --endpoint. Default: collection for "
            "their folders and attempts.jsonl, messages for other .jsonl, atif for .json and other folders.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model that is trained, for its chat template; default: that of the run."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="The configuration that trains on the episodes: its model, proxy.family and "
            "proxy.template_options are used."
        ),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(help="JSON file with the list of tools of the conversations that name none."),
    ] = None,
    reward: Annotated[
        float | None,
        typer.Option(
            help="The reward of every episode (algorithm.sft_min_score); default: the score that the file "
            "names, and 1 where it names none."
        ),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Only episodes for which the file names at least this score.")
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Also import, for training, what the file names as of split eval."),
    ] = False,
    without_reasoning: Annotated[
        bool,
        typer.Option("--without-reasoning", help="Leave out reasoning, for a chat template that has none."),
    ] = False,
) -> None:
    """Import conversations as episodes for supervised training (algorithm: sft), all or none."""
    import math

    from areal_agents.inspection.importing import read_files, write
    from areal_agents.inspection.sources import import_target, read_tools, template_of
    from areal_agents.proxy.server import make_renderer
    from areal_agents.store import Store

    if reward is not None and not math.isfinite(reward):
        raise ConfigError(f"a reward must be a finite number, got {reward}")
    target = import_target(into)
    folder, proxy = template_of(into, model=model, config=config)
    given = read_tools(tools) if tools is not None else []
    read = read_files(
        files,
        form,
        make_renderer(folder, proxy),
        tools=given,
        reward=reward,
        min_reward=min_reward,
        held_out=held_out,
        reasoning=not without_reasoning,
    )
    with Store.open(target) as store:
        done = write(read.episodes, store)
    print(
        f"imported {done.conversations} conversations into {target}: {done.replies} replies of "
        f"{done.tokens} tokens to learn; the longest conversation has {done.longest} tokens"
    )
    if read.below:
        _say(f"left out {read.below} episodes without a score of at least {min_reward:g}")
    if read.held_out:
        _say(
            f"left out {read.held_out} conversations of held-out tasks (split eval in the file); --held-out "
            "imports them too, to train on"
        )


def reward(
    episode: Annotated[str, typer.Argument(help="The id of the episode.", metavar="ID")],
    value: Annotated[float, typer.Argument(help="The reward.")],
    where: Where,
    name: Annotated[str, typer.Option(help="Name of the reward; the last one of a name counts.")] = "return",
    admin_key: AdminKey = None,
) -> None:
    """Give an episode a reward."""
    import math

    from areal_agents.inspection.sources import opened

    if not math.isfinite(value):
        raise ConfigError(f"a reward must be a finite number, got {value}")
    with opened(where, admin_key) as source:
        source.reward(episode, value, name)
    print(f"rewarded {episode} with {value:g} ({name})")


def replay(
    episode: Annotated[str, typer.Argument(help="The id of the episode.", metavar="EPISODE")],
    where: Annotated[
        str, typer.Argument(help="A run's folder, that of an evaluation, or a store file.", metavar="RUN")
    ],
    config: Annotated[
        Path | None,
        typer.Argument(
            help="The configuration that names the agent; default: that of RUN.", metavar="CONFIG"
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that override the configuration.", metavar="KEY=VALUE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the agent against the recorded replies of an episode, without a model, and compare its requests.

    The exit status is 1 if a request or a reward differs from the recorded one.
    """
    from dataclasses import asdict

    from areal_agents.config import load_config
    from areal_agents.doctor.replay import replay as run
    from areal_agents.inspection.show import show_replay
    from areal_agents.inspection.sources import stored
    from areal_agents.launch.signals import interruptible
    from areal_agents.proxy.server import make_renderer

    own = Path(where) / "config.yaml"
    if config is None and not own.is_file():
        raise ConfigError(
            f"{where} has no configuration; name the one of the agent: replay EPISODE RUN CONFIG"
        )
    loaded = load_config(config or own, overrides or (), weights=False)
    with stored(where) as (store, _):
        recorded, split = store.load_episode(episode), store.episode_row(episode).split
    if not any(not turn.discarded for turn in recorded.turns):
        raise ConfigError(f"episode {episode} has no recorded call to replay")
    with interruptible():
        found = run(
            recorded,
            model=Path(loaded.model),
            renderer=make_renderer(loaded.model, loaded.proxy),
            agent=loaded.agent,
            limits=loaded.rollout.limits,
            reward=loaded.reward,
            proxy=loaded.proxy,
            split=split,
        )
    if as_json:
        print(json.dumps({**asdict(found), "is_same": found.is_same}, default=str))
    else:
        show_replay(found, _console())
    if not found.is_same:
        raise typer.Exit(1)


def tail(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")],
    lines: Annotated[int, typer.Option(min=0, help="Number of earlier steps to show first.")] = 10,
) -> None:
    """Follow a run: a line for each step, warnings and errors, until it has ended or Ctrl-C."""
    from areal_agents.inspection.runs import follow

    console = _console()
    try:
        for line in follow(run, lines=lines):
            console.print(line, markup=False)
    except KeyboardInterrupt:
        return


def why(
    episode: Annotated[str, typer.Argument(help="The id of the episode.", metavar="EPISODE")],
    place: Annotated[
        list[str] | None,
        typer.Argument(
            help="The turn, by its id or by its number from 1; the token, by its index in the turn from 0; "
            "the folder of the run, by default the current folder if it is one, else the newest in runs/.",
            metavar="[TURN [TOKEN]] [RUN]",
        ),
    ] = None,
    *,
    versions: Annotated[
        bool,
        typer.Option(
            "--versions", help="Compute the turn's logprobs under each version whose weights remain."
        ),
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Show every token of a long turn.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show why tokens were trained as they were: from the rewards to each token's share of the loss."""
    from areal_agents.inspection.show_why import draw_why
    from areal_agents.inspection.why import why as explain
    from areal_agents.store.errors import NotFound

    run, turn, token = _place(place or [])
    if versions and turn is None:
        raise ConfigError("--versions needs a turn")
    try:
        found = explain(run, episode, turn, token)
    except NotFound as error:
        named = [episode, *(str(part) for part in (turn, token) if part is not None)]
        raise NotFound(
            f"{error} in {run.resolve()}; name another run as the last argument: "
            f"`areal-agents why {' '.join(named)} RUN`"
        ) from None
    if versions:
        from areal_agents.inspection.versions import logprobs_by_version

        found["versions"] = logprobs_by_version(run, episode, found["turn"]["id"], say=_say)
    if as_json:
        print(json.dumps(found))
    else:
        draw_why(found, _console(), full=full)


def _place(given: list[str]) -> tuple[Path, str | None, int | None]:
    """Return the run, the turn and the token that the last arguments of `why` name."""
    from areal_agents.inspection.runs import chosen_run

    rest = [*given]
    run = Path(rest.pop()) if rest and Path(rest[-1]).is_dir() else chosen_run()
    if len(rest) > 2:
        raise ConfigError(f"expected at most a turn, a token and the folder of a run, got {' '.join(given)}")
    if len(rest) == 2 and not rest[1].isdecimal():
        raise ConfigError(f"expected the index of a token or the folder of a run, got {rest[1]}")
    return run, rest[0] if rest else None, int(rest[1]) if len(rest) == 2 else None


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _console() -> Console:
    """Return a console that is wide enough for tables if it is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def diagnose(
    run: Annotated[Path, typer.Argument(help="The folder of the run, which may be running.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write.")] = None,
) -> None:
    """Say what a run does or waits for, and collect what an issue about it needs in one file.

    The file has the configuration, metrics, logs, packages and, of a running run, the stacks of its
    processes. Keys and passwords are removed; look through it before you publish it.
    """
    from areal_agents.inspection.diagnose import diagnose as write

    path = write(run, out, say=print)
    print(f"written to {path}; keys and passwords are removed, but look through it before you publish it")


def compare(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    with_: Annotated[
        Path, typer.Argument(help="A reference file, or the folder of another run.", metavar="REFERENCE")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare the curve of a run with reference curves.

    The exit status is 1 if the run ends below them, or has no evaluation of a trained step in common.
    """
    from dataclasses import asdict

    from areal_agents.evaluation import reference as curves
    from areal_agents.inspection.show import draw_comparison

    mine, references = curves.curve_of(run), curves.curves_in(with_)
    points = curves.compare(mine, references)
    curves.require_trained_step(mine, references, points)
    if as_json:
        found = [{**asdict(point), "verdict": point.verdict} for point in points]
        print(json.dumps({"run": asdict(mine), "points": found}))
    else:
        draw_comparison(mine, references, points, _console())
    if points[-1].verdict == "below":
        raise typer.Exit(1)


def reference(
    out: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    runs: Annotated[list[Path], typer.Argument(help="The folders of the runs, of several seeds.")],
    note: Annotated[
        str, typer.Option(help="How the runs were made: the command, the machine, its load.")
    ] = "",
) -> None:
    """Write the curves of runs to a file that `compare` holds other runs against."""
    from areal_agents.evaluation.reference import write_reference

    curves = write_reference(out, runs, note=note)
    ends = ", ".join(f"{curve.points[-1].reward:.3f}" for curve in curves)
    print(f"written to {out}: {curves[0].measured} at the end {ends}")
