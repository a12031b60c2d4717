"""`areal-agents eval`: starts what an evaluation needs, plays its episodes, and computes its results.

What was played is in the folder of the evaluation, so one that was killed continues when it is started again.
`areal-agents collect` is an evaluation on the tasks of training, whose episodes can be trained on.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from areal_agents.config import Config, save_config
from areal_agents.core.rollout import Split, Task
from areal_agents.errors import ConfigError, RewardError
from areal_agents.evaluation.endpoint.journal import JOURNAL
from areal_agents.evaluation.endpoint.play import ENDPOINT, Endpoint
from areal_agents.evaluation.folder import EvaluationFolder
from areal_agents.evaluation.played import Played, played_in_journal, played_in_store
from areal_agents.evaluation.policies import NamedPolicy
from areal_agents.evaluation.results import Results, field_of_tasks
from areal_agents.evaluation.scoring import ScoringFunction, score
from areal_agents.launch.agent_jobs import check_jobs, refuse_jobs
from areal_agents.launch.agent_sandbox import check_sandbox
from areal_agents.launch.children import Children
from areal_agents.launch.engines import EnginePlan
from areal_agents.launch.fingerprint import Fingerprint
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.signals import interruptible
from areal_agents.launch.train import (
    REFRESH_S,
    check_evaluation,
    chosen_endpoints,
    plan_of,
    start_evaluating,
    start_serving,
    wait_until_serving,
    without_trainer,
)
from areal_agents.launch.trial import run_trial
from areal_agents.launch.waiting import WaitLines
from areal_agents.rollout.config import DifficultyConfig, EvalConfig
from areal_agents.whole_files import write_whole

LABEL = "eval"
PROGRESS_S = 30.0
# Settings that do not change what is evaluated.
_WITHOUT_EFFECT = ("run_dir", "name", "model", "trainer", "algorithm", "data", "loop", "profile", "trial")


def evaluate(
    config: Config,
    policy: NamedPolicy | Endpoint,
    *,
    console: Console,
    out: Path | None = None,
    by: Sequence[str] = (),
    ablate_tool: bool = False,
    split: Split = "eval",
) -> Results:
    """Evaluate weights, or the model of an endpoint, on the held-out tasks of a configuration.

    Args:
        config: the configuration.
        policy: what is evaluated; `config.model` is the folder of weights.
        out: the folder of the evaluation, which is kept and in which a second call continues. None: a folder
            beside that of the run, which is deleted at the end unless the evaluation fails.
        by: fields of the tasks by whose values the results are divided.
        ablate_tool: whether the agent's tool is switched off.
        split: of the episodes; "train" if `eval.data` has tasks to train on, as `collecting` makes it.

    Raises:
        ConfigError: the configuration has no `eval`, or no `ablation` for `ablate_tool`; or `out` is the
            folder of another evaluation.
        AgentError: the agent, the reward function or the data cannot be loaded.
        ChildDied: a process ended before the evaluation.
    """
    evaluation = check_evaluation(config, ablate_tool)
    if isinstance(policy, Endpoint):
        policy.key()  # raises before anything is written
        model: Any = policy.as_dict()
        del model["key_variable"]
    elif config.engine.urls:
        raise ConfigError(
            "eval evaluates the weights of `model` in an engine that it starts; leave engine.urls out"
        )
    else:
        model = policy.fingerprint
    check_sandbox(config)
    if isinstance(policy, Endpoint):
        refuse_jobs(config, "eval --endpoint")
    else:
        check_jobs(config)
    config = without_trainer(config)
    folder = RunFolder((out or Path(config.run_dir + "-eval")).resolve())
    files = EvaluationFolder(folder.root)
    with _played(policy, folder, split) as played:
        has_ended = out is not None and played.is_complete(files.read_tasks(), evaluation.attempts)
    # Planned before anything is written; results that are complete need no engine.
    plan = plan_of(config, trains=False) if isinstance(policy, NamedPolicy) and not has_ended else None
    if out is None:
        folder.set_aside()
    identity = identity_of(config, model=model, ablate_tool=ablate_tool)
    files.begin(identity if split == "eval" else {**identity, "split": split})
    with folder.locked(), interruptible():
        if isinstance(policy, Endpoint) and not has_ended:
            _play_endpoint(config, policy, folder, console, by, ablate_tool=ablate_tool, split=split)
        elif isinstance(policy, NamedPolicy) and plan is not None:
            weights = policy.exported(folder.root / "model")
            served = config.model_copy(update={"model": str(weights)})
            _play(served, policy, plan, folder, console, by, ablate_tool=ablate_tool, split=split)
        name = policy.model if isinstance(policy, Endpoint) else policy.name
        with _played(policy, folder, split) as played:
            results = _results(config, name, played, files.read_tasks(), by, console)
        results.write(files.results)
    if out is None:
        shutil.rmtree(folder.root)
    return results


def collecting(config: Config, *, tasks: int, attempts: int, temperature: float) -> Config:
    """Return the configuration with `eval` for a collection: tasks of `data`, each `attempts` times.

    Raises:
        ConfigError: `data` has recorded episodes instead of tasks, or the temperature gives equal attempts.
    """
    if config.data.episodes:
        raise ConfigError(
            "data.episodes has episodes that are recorded already, and collect plays tasks: name these in "
            "data.path"
        )
    uniform: dict[str, Any] = {"sampler": "uniform", "difficulty": DifficultyConfig()}
    by_difficulty = config.data.sampler == "difficulty"
    given = config.eval.model_dump(include={"pass_score", "concurrency"}) if config.eval is not None else {}
    try:
        evaluation = EvalConfig(
            data=config.data.model_copy(update=uniform) if by_difficulty else config.data,
            episodes=tasks,
            attempts=attempts,
            temperature=temperature,
            **given,
        )
    except ValidationError as error:
        raise ConfigError(f"collect: {error.errors()[0]['msg']}") from None
    return config.model_copy(update={"eval": evaluation})


def _played(
    policy: NamedPolicy | Endpoint, folder: RunFolder, split: Split
) -> AbstractContextManager[Played]:
    if isinstance(policy, Endpoint):
        return played_in_journal(folder.root / JOURNAL)
    return played_in_store(folder.store, LABEL, split)


def identity_of(config: Config, *, model: Any, ablate_tool: bool) -> dict[str, Any]:
    """Return what the results of an evaluation depend on."""
    tree = {key: value for key, value in config.model_dump(mode="json").items() if key not in _WITHOUT_EFFECT}
    for name in ("concurrency", "workers"):
        del tree["rollout"][name]
    for name in ("host", "port", "public_url", "admin_key", "workers"):
        del tree["proxy"][name]
    del tree["eval"]["every"], tree["eval"]["concurrency"], tree["store"]
    sources = Fingerprint.of(config).parts
    return {"config": tree, "model": model, "ablate_tool": ablate_tool, "sources": sources}


def _play(
    config: Config,
    policy: NamedPolicy,
    plan: EnginePlan,
    folder: RunFolder,
    console: Console,
    by: Sequence[str],
    *,
    ablate_tool: bool,
    split: Split,
) -> None:
    """Play the episodes that are missing, with weights that engines of ours serve."""
    with chosen_endpoints(config) as endpoints:
        save_config(config, folder.config)
        folder.write_endpoints(endpoints)
        run_trial(folder, say=console.print, ablate_tool=ablate_tool, evaluates=True, by=by)
        with Children() as children:
            start_serving(config, folder, children, plan)
            wait_until_serving(config, endpoints, children, wait=WaitLines(console.print), warn=console.print)
            name = start_evaluating(
                folder, children, LABEL, ablate_tool=ablate_tool, collects=split == "train"
            )
            _wait_for(name, children, policy, folder, console, split)


def _play_endpoint(
    config: Config,
    endpoint: Endpoint,
    folder: RunFolder,
    console: Console,
    by: Sequence[str],
    *,
    ablate_tool: bool,
    split: Split,
) -> None:
    """Play the episodes that are missing, with the model of an endpoint."""
    save_config(config, folder.config)
    write_whole(folder.root / ENDPOINT, json.dumps(endpoint.as_dict()) + "\n")
    run_trial(folder, say=console.print, ablate_tool=ablate_tool, evaluates=True, by=by)
    with Children() as children:
        collects = split == "train"
        name = start_evaluating(
            folder, children, LABEL, ablate_tool=ablate_tool, collects=collects, role="endpoint"
        )
        _wait_for(name, children, endpoint, folder, console, split)


def _wait_for(
    name: str,
    children: Children,
    policy: NamedPolicy | Endpoint,
    folder: RunFolder,
    console: Console,
    split: Split,
) -> None:
    """Return when the process that plays has ended. Raises ChildDied if a process ended before."""
    shown = time.monotonic()
    while not children.finished(name):
        children.check(may_finish=(name,))
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            with _played(policy, folder, split) as played:
                console.print(f"{len(played.attempts)} episodes have ended")
        time.sleep(REFRESH_S)
    children.check(may_finish=(name,))


def _results(
    config: Config, model: str, played: Played, tasks: Sequence[Task], by: Sequence[str], console: Console
) -> Results:
    evaluation = check_evaluation(config, ablate_tool=False)
    answers: Mapping[str, str | None] = {}
    if evaluation.answer:
        answers = _answers(played, evaluation.answer, workers=config.rollout.workers, console=console)
    return Results(
        name=config.name,
        model=model,
        attempts=evaluation.attempts,
        temperature=evaluation.temperature,
        pass_score=evaluation.pass_score,
        has_answers=bool(evaluation.answer),
        tasks=played.results(tasks, evaluation.attempts, answers=answers, by=fields_of(tasks, by)),
    )


def fields_of(tasks: Sequence[Task], by: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the values of fields: by the name of the field, then by task id. Raises ConfigError."""
    inputs = {task.id: task.input for task in tasks}
    return {name: field_of_tasks(inputs, name) for name in by}


def _answers(played: Played, function: str, *, workers: int, console: Console) -> dict[str, str | None]:
    """Return the answer of each scored episode, by its id. Raises RewardError if none can be read."""
    ids = played.scored
    batches = ([episode] for episode in played.episodes(ids))
    found = asyncio.run(score(ScoringFunction.answers(function), batches, workers=workers))
    answers = {
        id: scored.values[0] if scored.values is not None else None
        for id, scored in zip(ids, found, strict=True)
    }
    errors = [scored.error for scored in found if scored.error is not None]
    if errors and len(errors) == len(found):
        raise RewardError(f"eval.answer: no answer could be read; the last error: {errors[-1]}")
    if errors:
        console.print(
            f"the answers of {len(errors)} episodes could not be read and have no vote; the last error: "
            f"{errors[-1]}"
        )
    return answers
