"""The commands `eval`, `eval compare`, `collect` and `rescore`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console

from areal_agents.errors import ConfigError
from areal_agents.extras import require

if TYPE_CHECKING:
    from areal_agents.config import Config
    from areal_agents.evaluation.endpoint.play import Endpoint
    from areal_agents.evaluation.policies import NamedPolicy
    from areal_agents.rollout.config import RewardConfig

_DEFAULT = "run"


class _EvalGroup(typer.core.TyperGroup):
    """Runs `eval CONFIG …` as `eval run CONFIG …`, unless the first word is a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the default command unless another one, or help, is asked for."""
        return super().parse_args(ctx, self._with_command(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See `parse_args`."""
        return super().resolve_command(ctx, self._with_command(args))

    def _with_command(self, args: list[str]) -> list[str]:
        named = not args or args[0] in self.commands or args[0] == "--help"
        return args if named else [_DEFAULT, *args]


eval_app = typer.Typer(
    cls=_EvalGroup,
    no_args_is_help=True,
    help="Evaluate a policy: `areal-agents eval CONFIG` is short for `areal-agents eval run CONFIG`.",
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to a command line."""
    app.add_typer(eval_app, name="eval")
    app.command()(collect)
    app.command()(rescore)


@eval_app.command(_DEFAULT)
def run(
    config: Annotated[Path, typer.Argument(help="The YAML configuration file.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings that override the file, for example eval.episodes=500.", metavar="KEY=VALUE"
        ),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="What to evaluate: a model folder, a Hub id, or weights of a run as RUN@final, RUN@best or "
            "RUN@STEP; default: the config's model. With --endpoint: the name of its model."
        ),
    ] = None,
    attempts: Annotated[
        int | None, typer.Option("-k", min=1, help="Attempts at each task; the same as eval.attempts.")
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(help="Divide the results by this field of the tasks; may be given several times."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results, the episodes and the logs; an evaluation that was stopped "
            "continues in it. Default: RUN_DIR-eval, which is deleted when the evaluation has ended."
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="URL, with /v1, of a server with OpenAI's chat completions, which plays the policy under "
            "the name that --model gives, and no engine is started."
        ),
    ] = None,
    endpoint_key_env: Annotated[
        str,
        typer.Option(
            help="Environment variable that has the endpoint's key; default: OPENAI_API_KEY, if set."
        ),
    ] = "",
    ablate_tool: Annotated[
        bool, typer.Option("--ablate-tool", help="Evaluate the config's `ablation` agent.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a model on the held-out tasks of a config."""
    from areal_agents.evaluation.show import show_results
    from areal_agents.launch.evaluation import evaluate

    changes = [*(overrides or ()), *([f"eval.attempts={attempts}"] if attempts else [])]
    loaded, policy = _loaded(config, changes, model, endpoint, endpoint_key_env)
    console = Console(stderr=as_json)
    results = evaluate(loaded, policy, console=console, out=out, by=by or (), ablate_tool=ablate_tool)
    if as_json:
        print(json.dumps(asdict(results.metrics())))
    else:
        show_results(results, _wide())
        if out is not None:
            console.print(f"results: {out / 'results.json'}", soft_wrap=True, highlight=False)
    if all(attempt.status == "failed" for task in results.tasks for attempt in task.attempts):
        raise typer.Exit(1)


def _loaded(
    config: Path, changes: Sequence[str], model: str | None, endpoint: str | None, key_variable: str
) -> tuple[Config, NamedPolicy | Endpoint]:
    """Return the configuration, and the weights or the endpoint that play."""
    from areal_agents.config import load_config
    from areal_agents.evaluation.endpoint.play import Endpoint
    from areal_agents.evaluation.policies import NamedPolicy, policy_of_run

    if endpoint is not None:
        if not model:
            raise ConfigError("--endpoint needs --model, the name of the model that the server is asked for")
        return load_config(config, changes, weights=False), Endpoint(endpoint, model, key_variable)
    require("torch", "an engine for the model")
    of_run = policy_of_run(model) if model else None
    if model:
        changes = [*changes, f"model={of_run.folder if of_run is not None else model}"]
    loaded = load_config(config, changes)
    return loaded, of_run or NamedPolicy(model or loaded.model, Path(loaded.model))


def collect(
    config: Annotated[Path, typer.Argument(help="The YAML configuration file.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings that override the file, for example data.path=more.jsonl.", metavar="KEY=VALUE"
        ),
    ] = None,
    *,
    out: Annotated[
        Path,
        typer.Option(help="Folder for the episodes; a collection that was stopped continues in it."),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="What plays: with --endpoint the name of its model; else a model folder, a Hub id, or "
            "weights of a run as RUN@final, RUN@best or RUN@STEP; default: the config's model."
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="URL, with /v1, of a server with OpenAI's chat completions, which has the model."),
    ] = None,
    endpoint_key_env: Annotated[
        str,
        typer.Option(
            help="Environment variable that has the endpoint's key; default: OPENAI_API_KEY, if set."
        ),
    ] = "",
    tasks: Annotated[
        int, typer.Option(min=1, help="The number of tasks of `data`; at most as many as it has.")
    ] = 128,
    attempts: Annotated[int, typer.Option("-k", min=1, help="Episodes of each task.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sampling temperature of the endpoint; default: 1, as in training."),
    ] = None,
) -> None:
    """Play the tasks of training with a model, also that of another server, and keep the episodes.

    They are there to be trained on: by `data.episodes`, or, of an endpoint, by `episodes import`.
    """
    from areal_agents.evaluation.show import show_results
    from areal_agents.launch.evaluation import collecting, evaluate

    if endpoint is None and temperature not in (None, 1.0):
        raise ConfigError(
            "episodes of weights are sampled at temperature 1, as in training; leave --temperature out"
        )
    loaded, policy = _loaded(config, overrides or (), model, endpoint, endpoint_key_env)
    played = 1.0 if temperature is None else temperature
    collected = collecting(loaded, tasks=tasks, attempts=attempts, temperature=played)
    console = Console()
    results = evaluate(collected, policy, console=console, out=out, split="train")
    show_results(results, _wide())
    scores = [a.score for task in results.tasks for a in task.attempts if a.status != "failed"]
    good = sum(score >= results.pass_score for score in scores)
    counted = (
        f"{len(scores)} episodes in {out}, {good} of them with a score of at least {results.pass_score:g}"
    )
    then = (
        f"make them episodes of the model that learns: areal-agents episodes import {out} --into "
        f"demonstrations.db --config {config} --min-reward {results.pass_score:g}"
        if endpoint is not None
        else f"train on them: data.episodes={out}"
    )
    console.print(f"{counted}; {then}", soft_wrap=True, highlight=False, markup=False)
    if not scores:
        raise typer.Exit(1)


@eval_app.command()
def compare(
    first: Annotated[
        Path, typer.Argument(help="Results of an evaluation: its folder, or results.json.", metavar="A")
    ],
    second: Annotated[Path, typer.Argument(help="The results to compare with them.", metavar="B")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two evaluations, paired by task, and test whether they differ."""
    from areal_agents.evaluation.comparison import compare_files
    from areal_agents.evaluation.show import show_comparison

    a, b, found = compare_files(first, second)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        show_comparison(a, b, found, _wide())


def rescore(
    where: Annotated[
        str, typer.Argument(help="A run's folder, that of an evaluation, or a store.", metavar="RUN")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="The reward function, for example reward=rewards.py:score, reward.group=rewards.py:rank or "
            "reward.time_s=10; default: that of the run.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the new rewards, JSON; default: only the summary is printed."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Only episodes of this split: train or eval.")] = None,
    task: Annotated[str | None, typer.Option(help="Only episodes of the task with this id.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that call the function; default: one for each core.")
    ] = None,
) -> None:
    """Recompute the rewards of stored episodes with a reward function, without a model.

    The rewards in the store stay as they are.
    """
    from areal_agents.evaluation.rescoring import rescore as run
    from areal_agents.evaluation.show import show_rescoring
    from areal_agents.inspection.sources import stored
    from areal_agents.proxy.config import available_cores

    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}")
    with stored(where) as (store, tree):
        config = _reward_of(settings or (), tree)
        found = [e for e in store.episodes(split=split) if task is None or e.task_id == task]
        rescored = run(
            store.load_episodes,
            found,
            config,
            source=where,
            old_function=tree.get("reward") is not None,
            workers=workers or available_cores(),
        )
    if out is not None:
        rescored.write(out)
    show_rescoring(rescored, _wide())
    if out is not None:
        print(f"new rewards: {out}")


def _reward_of(settings: Sequence[str], tree: Mapping[str, Any]) -> RewardConfig:
    """Return the reward function that settings name, or that of a run. Raises ConfigError without any."""
    from areal_agents.config.files import with_absolute_paths, with_overrides
    from areal_agents.rollout.config import RewardConfig

    given = tree.get("reward")
    base: dict[str, Any] = {}
    changes = []
    for setting in settings:
        key, _, value = setting.partition("=")
        if key != "reward" and not key.startswith("reward."):
            raise ConfigError(f"expected reward=… or a key of it such as reward.time_s=10, got {setting!r}")
        name = key.removeprefix("reward").removeprefix(".") or "episode"
        if name in ("episode", "group"):
            named = with_absolute_paths({"reward": {name: value}}, Path.cwd())
            given, value = {}, named["reward"][name]
        changes.append(f"{name}={value}")
    base = given if isinstance(given, dict) else {"episode": given} if given else {}
    if not base and not changes:
        raise ConfigError("the run has no reward function; name one, for example reward=rewards.py:score")
    return with_overrides(RewardConfig, base, changes)


def _wide() -> Console:
    """Return a console that is wide enough for tables if it is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


__all__: Sequence[str] = ("add_commands", "eval_app")
