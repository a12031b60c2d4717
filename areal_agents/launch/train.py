"""`areal-agents train`: starts the processes of a run, shows their progress, and ends them all.

The supervisor has no state of its own: the state of the run is in the store and in metrics.jsonl, so a run
that is stopped at any time resumes from the last checkpoint when it is started again.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console

from areal_agents.config import Config, is_saved, save_config
from areal_agents.errors import ConfigError
from areal_agents.health.waiting import Waiting
from areal_agents.inference.config import SERVERS
from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.agent_jobs import NO_TRIAL, check_jobs
from areal_agents.launch.agent_sandbox import check_sandbox
from areal_agents.launch.children import Children
from areal_agents.launch.disk_space import disk_space_of
from areal_agents.launch.dtypes import check_dtypes
from areal_agents.launch.engine_busy import EngineBusy
from areal_agents.launch.engines import EnginePlan, engine_name, plan_engines, wait_for_engines
from areal_agents.launch.fingerprint import Fingerprint, FingerprintFile, notice_of
from areal_agents.launch.memory_check import check_memory
from areal_agents.launch.memory_use import MemoryUse
from areal_agents.launch.nodes import Nodes, nodes_of
from areal_agents.launch.outside_trainer import OutsideTrainer
from areal_agents.launch.progress import MetricsFile, ProgressReader, read_held_out
from areal_agents.launch.ready import READY_TIMEOUT_S, wait_until_ready
from areal_agents.launch.report.report import Form, Report, report_of
from areal_agents.launch.run_folder import Endpoints, RunFolder
from areal_agents.launch.signals import interruptible
from areal_agents.launch.stopping import stop_timeout_s
from areal_agents.launch.summary import Summary, complete_evaluations, plot_rewards
from areal_agents.launch.trial import run_trial
from areal_agents.launch.waiting import OnWait
from areal_agents.launch.weight_fetcher import check_location
from areal_agents.proxy.config import available_cores
from areal_agents.proxy.page import link_of_page, new_view_key
from areal_agents.rollout.agent_variables import agent_variables
from areal_agents.rollout.config import EvalConfig, job_of_agent
from areal_agents.secret_variables import given_engine_key, new_engine_key
from areal_agents.store import Store
from areal_agents.store.roles import Role
from areal_agents.training.metrics.trackers import check_trackers

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
WITHOUT_TOOL = "after-without-tool"


def train(
    config: Config,
    *,
    console: Console,
    fresh: bool = False,
    ablate_tool: bool = False,
    form: Form = "auto",
) -> Summary:
    """Train the run that `config` describes to its last step.

    If a run has already ended with the same configuration, only its summary is shown.

    Args:
        config: the resolved configuration.
        console: the console for progress and results.
        fresh: set an earlier run in the same folder aside instead of resuming it.
        ablate_tool: after training, also evaluate with the agent's tool switched off.
        form: how the run is shown, see `report_of`.

    Raises:
        ConfigError: another process uses the run folder, a port is taken, a tracker is not installed, or an
            engine cannot be started or used as the configuration says.
        ChildDied: the trainer ended before its last step, or another process ended too often.
        Interrupted: the user stopped the run; all processes have been ended.
    """
    if ablate_tool:
        check_evaluation(config, ablate_tool)
    check_trackers(config.trainer.trackers)
    check_sandbox(config)
    check_jobs(config)
    nodes = nodes_of(config.trainer, os.environ)
    if nodes.rank:
        raise ConfigError(
            f"this is node {nodes.rank}; the run is started on node 0, and joined on the others"
        )
    plan = None if config.data.episodes else plan_of(config)
    report = report_of(config, console, form)
    config = without_place(config)
    check_location(config.trainer.publish)
    folder = RunFolder(Path(config.run_dir))
    if folder.rerun.exists() and not fresh:
        raise ConfigError(
            f"{folder.root} has a rerun, which is not continued; to train on from its weights, use "
            f"model={folder.final_model} with another run_dir=..."
        )
    if fresh or not has_ended(config, folder):
        check_memory(config, nodes, report.say)  # before anything of an earlier run is changed
    for earlier in folder.set_aside(config.store.url) if fresh else ():
        report.say(f"the earlier run is kept in {earlier}")
    with folder.locked(config.store.url), interruptible(), chosen_endpoints(config) as endpoints:
        if not ablate_tool and has_ended(config, folder):
            report.say(
                f"{folder.root} is finished; raise trainer.steps to continue, or use --fresh to start over"
            )
            _report_change_since_end(config, folder, report)
            summary = Summary.read(folder.summary)
            report.result(summary, folder)
            return summary
        folder.summary.unlink(missing_ok=True)  # until this run ends, it has no summary
        has_changed = report_resume(config, folder, report)
        if config.data.traffic:
            with Store.open(folder.store_at(config.store.url)) as store:
                _check_share(config, store)  # before the share is in the folder, where other commands read it
        save_config(config, folder.config)
        _report_plan(config, folder, report, plan, nodes)
        has_trial = config.trial and bool(config.agent) and plan is not None
        if has_trial and job_of_agent(config.agent) is not None:
            report.say(NO_TRIAL)
        elif has_trial and (has_changed or not folder.metrics.exists()):
            run_trial(folder, say=report.say, ablate_tool=ablate_tool)
        with Children(say=report.event, events=folder.process_events) as children:
            begun = time.monotonic()
            try:
                with report:
                    if plan is None:
                        _run_recorded(config, folder, children, report, nodes)
                        idle = None
                    elif config.data.traffic:
                        _run_traffic(config, endpoints, folder, children, report, plan, nodes)
                        idle = None
                    else:
                        idle = _run(config, endpoints, folder, children, report, plan, nodes)
            finally:
                wall_s = folder.add_wall_s(time.monotonic() - begun)
            without_tool = None
            if ablate_tool:
                report.say("evaluating with the agent's tool switched off")
                without_tool = _evaluate_once(config, folder, children, WITHOUT_TOOL, ablate_tool=True)
        return finish(config, folder, report, wall_s=wall_s, engine_idle=idle, without_tool=without_tool)


def without_place(config: Config) -> Config:
    """Return the configuration without what differs between the nodes, or between two starts of a run."""
    anywhere = config.trainer.model_copy(update={"nodes": 0, "node_rank": None, "master": ""})
    return config.model_copy(update={"trainer": anywhere})


def has_ended(config: Config, folder: RunFolder) -> bool:
    """Whether a run with exactly this configuration has ended in `folder`, and its results still exist."""
    left = (folder.summary, folder.final_model)
    return all(path.exists() for path in left) and is_saved(config, folder.config)


def without_trainer(config: Config) -> Config:
    """Return `config` for engines that share no GPU with a trainer, and with a store of its own.

    With the store of the run, the engines would serve its current version instead of the weights in `model`.
    """
    engine = config.engine.model_copy(update={"colocate": "none"})
    store = config.store.model_copy(update={"url": None})
    return config.model_copy(update={"engine": engine, "store": store})


def plan_of(config: Config, *, trains: bool = True) -> EnginePlan:
    """Plan how the engines are started, and log the settings of `engine` that have no effect on them.

    Args:
        trains: whether a trainer runs beside the engines, on the first GPUs.
    """
    if names := config.engine.without_effect:
        logger.warning(
            "settings that have no effect on %s: %s",
            "running servers, which keep their own settings"
            if config.engine.urls
            else SERVERS[config.engine.kind],
            ", ".join(f"engine.{name}" for name in names),
        )
    if not trains:
        on_the_cpu = config.trainer.model_copy(update={"device": "cpu"})
        config = config.model_copy(update={"trainer": on_the_cpu})
    plan = plan_engines(config)
    if trains:
        check_dtypes(config, plan.placements)
    return plan


def report_resume(config: Config, folder: RunFolder, report: Report) -> bool:
    """Say that a run is resumed, and what of its agent has changed; return whether something has."""
    metrics = MetricsFile(folder.metrics)
    metrics.update()
    step = metrics.rows[-1]["step"] if metrics.rows else 0
    if step:
        report.say(
            f"resuming {folder.root}, which has trained {step} steps{_lost_steps(folder, step)}; use --fresh "
            "to start over"
        )
    labels = []
    if step:
        with Store.open(folder.store_at(config.store.url)) as store:
            labels = [evaluation.label for evaluation in read_held_out(store)]
    report.resume(metrics.rows, labels)
    if not config.agent:
        return False
    changes = FingerprintFile(folder.fingerprint).record(Fingerprint.of(config), step=step)
    if changes:
        report.event(notice_of(changes))
    return bool(changes)


def _lost_steps(folder: RunFolder, step: int) -> str:
    """Return which steps are trained again, because the newest checkpoint is older; "" if none are."""
    saved = folder.checkpoint_step or 0
    if saved >= step:
        return ""
    since = f"its newest checkpoint is that of step {saved}" if saved else "it has no checkpoint yet"
    return f"; {since}, so training continues at step {saved + 1}"


def _report_change_since_end(config: Config, folder: RunFolder, report: Report) -> None:
    """Say what of the agent of a finished run has changed since its last start."""
    earlier = None if not config.agent else FingerprintFile(folder.fingerprint).last()
    if earlier is not None and (changes := Fingerprint.of(config).changes_since(earlier)):
        report.event(f"{changes} changed since then: these results are from before the change")


def _report_plan(
    config: Config, folder: RunFolder, report: Report, plan: EnginePlan | None, nodes: Nodes
) -> None:
    if plan is not None:
        report.say(plan.describe(folder))
        proxy = config.proxy.for_engines(config.engine.sequences)
        if proxy.workers > 1:
            report.say(f"proxy: {proxy.workers} workers")
    ranks = config.trainer.ranks
    trainer = f"trainer: {ranks} rank{'s' if ranks > 1 else ''}"
    if not config.trainer.start:
        trainer += f", started elsewhere: areal-agents processes trainer --folder {folder.root}"
    if nodes.count > 1:
        trainer += f" on {nodes.count} nodes, which meet at {nodes.host}:{nodes.port}"
    colocated = (
        "" if config.engine.colocate == "none" else f", colocated with the engines ({config.engine.colocate})"
    )
    report.say(f"{trainer}{colocated}; logs of all processes: {folder.log('trainer').parent}")
    report.say(f"to look at it in a browser, also later: areal-agents view {shlex.quote(str(folder.root))}")


@contextmanager
def chosen_endpoints(config: Config) -> Iterator[Endpoints]:
    """Choose ports that the config does not name, reserved within the with-block, and new keys."""
    with reserved_ports(1 + config.engine.replicas) as (proxy, *engines):
        urls = config.engine.urls or tuple(f"http://127.0.0.1:{port}" for port in engines)
        key = config.proxy.admin_key or f"admin-{secrets.token_urlsafe(24)}"
        engine_key = engine_key_for(config)
        yield Endpoints(
            urls, config.proxy.host, config.proxy.port or proxy, key, new_view_key(), engine_key=engine_key
        )


def engine_key_for(config: Config) -> str:
    """Return the key of the engines: that of running servers, or a new one for those that the run starts."""
    return given_engine_key() if config.engine.urls else new_engine_key()


def threads_for(role: str, *, alone: bool = False, engines: int = 1, given: int = 0) -> dict[str, str]:
    """Return environment variables that give a process its share of the cores.

    The engines together get half of the cores, and the trainer the other half, which its ranks on this
    machine divide (`training.distributed.use_threads`).

    Args:
        role: the role of the process.
        alone: whether the process gets all cores.
        engines: the number of engines that share their half.
        given: the number of threads of all engines together, instead of half of the cores; 0: half.
    """
    cores = available_cores()
    engine = max(1, cores // 2)
    share = max(1, (given or engine) // engines)
    count = cores if alone else {"engine": share, "trainer": max(1, cores - engine)}.get(role, 1)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**{name: str(count) for name in names}, "TOKENIZERS_PARALLELISM": "false"}


def start_serving(config: Config, folder: RunFolder, children: Children, plan: EnginePlan) -> None:
    """Start the engines of the plan and the proxy."""
    start_engines(config, folder, children, plan)
    _start(children, folder, "proxy")


def start_engines(
    config: Config, folder: RunFolder, children: Children, plan: EnginePlan, *arguments: str
) -> None:
    """Start the engines of the plan; `arguments` are further ones of their processes."""
    count = len(plan.placements)
    for replica, placement in enumerate(plan.placements):
        _start(
            children,
            folder,
            "engine",
            *("--replica", str(replica), "--gpus", ",".join(map(str, placement.gpus)), *arguments),
            name=engine_name(replica, count),
            environment=threads_for("engine", engines=count, given=config.engine.threads),
        )


def wait_until_serving(
    config: Config,
    endpoints: Endpoints,
    children: Children,
    *,
    wait: OnWait,
    warn: Callable[[str], None],
) -> None:
    """Return when the proxy and the engines answer; if the run uses running servers, one of them is enough.

    Args:
        wait: called during the wait.
        warn: called with a message about running servers that do not answer.

    Raises:
        ChildDied: a process ended before that.
        ConfigError: a running server was started without a flag that the run needs.
    """
    key = endpoints.engine_key
    wait_for_engines(config, endpoints.engine_urls, check=children.check, wait=wait, warn=warn, key=key)
    wait_until_ready(
        endpoints.proxy_url + "/health",
        check=children.check,
        waiting=lambda waited_s: wait("the proxy", waited_s, READY_TIMEOUT_S),
    )


def _run(
    config: Config,
    endpoints: Endpoints,
    folder: RunFolder,
    children: Children,
    report: Report,
    plan: EnginePlan,
    nodes: Nodes,
) -> float | None:
    """Run rollouts and training side by side; return the engines' idle share."""
    folder.write_endpoints(endpoints)
    with Store.open(folder.store_at(config.store.url)) as store:
        first = store.max_version() + 1
    folder.notice.unlink(missing_ok=True)
    start_serving(config, folder, children, plan)
    if config.engine.colocate != "none":  # an engine measures the memory that is left for it before it serves
        wait_until_serving(config, endpoints, children, wait=report.wait, warn=report.event)
    # Each process waits for those that it needs, so all of them load at the same time.
    start_trainer(config, folder, children, nodes)
    rollout = {**threads_for("rollout"), **agent_variables()}
    _start(children, folder, "rollout", "--first-version", str(first), environment=rollout)
    wait_until_serving(config, endpoints, children, wait=report.wait, warn=report.event)
    link = link_of_page(endpoints.local_url, endpoints.view_key)
    report.say(f"the run in a browser, while it trains: {link}")
    report.stage("waiting for the trainer's first version")
    with Store.open(folder.store_at(config.store.url)) as store:
        ended = _trainer_ended(config, folder, children, store)
        look_for_trainer = _looking(config, folder, store, report, ended)
        return watch_training(
            config,
            endpoints,
            folder,
            children,
            report,
            store,
            engines=endpoints.engine_urls,
            ending=("rollout", "trainer"),
            has_ended=lambda: children.finished("rollout") and ended(),
            look=look_for_trainer,
        )


def watch_training(
    config: Config,
    endpoints: Endpoints,
    folder: RunFolder,
    children: Children,
    report: Report,
    store: Store,
    *,
    engines: tuple[str, ...],
    ending: Sequence[str],
    has_ended: Callable[[], bool],
    look: Callable[[], None] = lambda: None,
    places: Collection[tuple[Role, int]] = (),
) -> float | None:
    """Show a run while it trains, until it has ended; return the engines' idle share.

    Args:
        engines: the URLs of the engines; () if they may be out of reach here, so that none is asked.
        ending: the names of the processes that end with the run; the death of others is an error.
        look: called again and again; an exception from it ends the run.
        places: the role and index of each process of a run on several machines.
    """
    metrics = MetricsFile(folder.metrics)
    reader = ProgressReader(store)
    disk_space = disk_space_of(config, folder)
    memory = MemoryUse(children.pids)
    busy = EngineBusy(engines, key=endpoints.engine_key)
    waiting = Waiting(engines, endpoints.proxy_url, groups=config.rollout.groups, places=places)
    while not has_ended():
        children.check(may_finish=ending)
        look()
        metrics.update()
        busy.follow(len(metrics.rows), config.trainer.steps)
        memory.update()
        progress = reader.latest()
        begun = progress.version >= 0 and len(metrics.rows) < config.trainer.steps
        stalled = waiting.check(metrics.rows, progress.groups, store) if begun else None
        report.warn(disk_space.shortage() or stalled)
        _show_notice(folder, report)
        report.update(metrics.rows, progress, memory)
        time.sleep(REFRESH_S)
    children.check(may_finish=ending)
    metrics.update()
    _show_notice(folder, report)
    report.update(metrics.rows, reader.read(), memory)
    return busy.idle_share()


def _show_notice(folder: RunFolder, report: Report) -> None:
    """Show, once, what the rollout process tells the user, such as that its agent blocks its event loop."""
    if folder.notice.exists():
        taken = folder.notice.rename(folder.notice.with_suffix(".shown"))
        report.event(taken.read_text())
        taken.unlink()


def _run_recorded(
    config: Config, folder: RunFolder, children: Children, report: Report, nodes: Nodes
) -> None:
    """Train on recorded episodes: run the trainer alone, with all cores."""
    report.stage("reading the recorded episodes")
    start_trainer(config, folder, children, nodes, alone=True)
    metrics = MetricsFile(folder.metrics)
    memory = MemoryUse(children.pids)
    with Store.open(folder.store_at(config.store.url)) as store:
        ended = _trainer_ended(config, folder, children, store)
        look_for_trainer = _looking(config, folder, store, report, ended)
        reader = ProgressReader(store)
        while not ended():
            children.check(may_finish=("trainer",))
            look_for_trainer()
            metrics.update()
            memory.update()
            report.update(metrics.rows, reader.latest(), memory)
            time.sleep(REFRESH_S)
        children.check(may_finish=("trainer",))
        metrics.update()
        report.update(metrics.rows, reader.read(), memory)


def _run_traffic(
    config: Config,
    endpoints: Endpoints,
    folder: RunFolder,
    children: Children,
    report: Report,
    plan: EnginePlan,
    nodes: Nodes,
) -> None:
    """Serve users, and train on their conversations beside that. A trainer that dies is started again."""
    folder.write_endpoints(endpoints)
    with Store.open(folder.store_at(config.store.url)) as store:
        start_serving(config, folder, children, plan)
        start_trainer(config, folder, children, nodes, restarts=True)
        wait_until_serving(config, endpoints, children, wait=report.wait, warn=report.event)
        report.say(f"users call {endpoints.local_url}/v1; rewards: POST {endpoints.local_url}/rewards")
        link = link_of_page(endpoints.local_url, endpoints.view_key)
        report.say(f"the run in a browser: {link}")
        metrics = MetricsFile(folder.metrics)
        memory = MemoryUse(children.pids)
        ended = _trainer_ended(config, folder, children, store)
        look_for_trainer = _looking(config, folder, store, report, ended)
        reader = ProgressReader(store)
        while not ended():
            children.check(may_finish=("trainer",))
            look_for_trainer()
            metrics.update()
            memory.update()
            report.update(metrics.rows, reader.latest(), memory)
            time.sleep(REFRESH_S)
        children.check(may_finish=("trainer",))
        metrics.update()
        report.update(metrics.rows, reader.read(), memory)


def _check_share(config: Config, store: Store) -> None:
    """Refuse another share of the canary while a candidate is compared: conversations would change sides."""
    served = store.served_versions()
    candidate, canary = None if served is None else served.candidate, config.rollout.canary
    if candidate is None:
        return
    if canary is None:
        raise ConfigError(
            f"rollout.canary: version {candidate.version} is a candidate without a verdict; keep "
            "rollout.canary until there is one; areal-agents online orders one"
        )
    if candidate.share != canary.share:
        raise ConfigError(
            f"rollout.canary.share: version {candidate.version} is compared with a share of "
            f"{candidate.share}, and with {canary.share} conversations would change their sides; use "
            f"{candidate.share} until there is a verdict"
        )


def _trainer_ended(config: Config, folder: RunFolder, children: Children, store: Store) -> Callable[[], bool]:
    """Return a function that says whether the trainer has ended.

    One that is started elsewhere has ended when the last step's version is published and the final weights
    are written; if it dies before that, it can be started again while this process waits.
    """
    if config.trainer.start:
        return lambda: children.finished("trainer")

    def written() -> int:
        return folder.final_model.stat().st_mtime_ns if folder.final_model.exists() else 0

    earlier = written()

    def ended() -> bool:
        latest = store.latest_version()
        trained = config.data.episodes or (latest is not None and latest.step >= config.trainer.steps)
        return bool(trained) and written() not in (0, earlier)

    return ended


def _looking(
    config: Config, folder: RunFolder, store: Store, report: Report, ended: Callable[[], bool]
) -> Callable[[], None]:
    """Return a function that ends the run if a trainer that something else starts does not come."""
    if config.trainer.start:
        return lambda: None
    limit_s = config.trainer.join_timeout_s
    return OutsideTrainer(folder, store.url, limit_s=limit_s, has_ended=ended, say=report.event).check


def check_evaluation(config: Config, ablate_tool: bool) -> EvalConfig:
    """Return the settings of evaluation. Raises ConfigError if there are none, or no agent without tools."""
    if config.eval is None:
        raise ConfigError("there is nothing to evaluate on: the config has no eval.data; add it")
    if ablate_tool and config.ablation is None:
        raise ConfigError(
            "--ablate-tool needs `ablation:` in the config, the agent function with its tools switched off"
        )
    return config.eval


def _evaluate_once(
    config: Config, folder: RunFolder, children: Children, label: str, *, ablate_tool: bool
) -> float:
    name = start_evaluating(folder, children, label, ablate_tool=ablate_tool)
    while not children.finished(name):
        children.check(may_finish=("rollout", "trainer", name))
        time.sleep(REFRESH_S)
    children.check(may_finish=("rollout", "trainer", name))
    with Store.open(folder.store_at(config.store.url)) as store:
        return next(e.reward for e in read_held_out(store) if e.label == label)


def start_evaluating(
    folder: RunFolder,
    children: Children,
    label: str,
    *,
    ablate_tool: bool = False,
    collects: bool = False,
    role: str = "rollout",
) -> str:
    """Start the process that evaluates what is served, or an endpoint; return its name.

    Args:
        collects: whether the tasks of `eval.data` are there to be trained on.
    """
    extra = [
        *(["--evaluate", label] if role == "rollout" else []),
        *(["--ablate-tool"] if ablate_tool else []),
        *(["--collects"] if collects else []),
    ]
    name = f"{role}-{label}"
    children.start(
        name,
        [role, "--folder", str(folder.root), *extra],
        log=folder.log(name),
        environment={**threads_for("rollout"), **agent_variables()},
    )
    return name


def _start(
    children: Children,
    folder: RunFolder,
    role: str,
    *arguments: str,
    name: str = "",
    environment: Mapping[str, str] | None = None,
) -> None:
    children.start(
        name or role,
        [role, "--folder", str(folder.root), *arguments],
        log=folder.log(name or role),
        environment=threads_for(role) if environment is None else environment,
        restarts=True,
    )


def start_trainer(
    config: Config,
    folder: RunFolder,
    children: Children,
    nodes: Nodes,
    *,
    alone: bool = False,
    role: Literal["trainer", "rerun"] = "trainer",
    restarts: bool = False,
) -> None:
    """Start this node's ranks of the trainer. By default their death, which loses steps, ends the run."""
    if not config.trainer.start:
        return
    ranks = config.trainer.ranks
    process, place = [role, "--folder", str(folder.root)], []
    if ranks > 1:
        place = ["--ranks", str(ranks), "--nodes", str(nodes.count), "--node-rank", str(nodes.rank)]
        place += ["--master", f"{nodes.host}:{nodes.port}", "--"]
    children.start(
        "trainer",
        [*place, *process],
        log=folder.log("trainer"),
        environment=threads_for("trainer", alone=alone),
        module="areal_agents.launch.local_ranks" if ranks > 1 else "",
        stop_timeout_s=stop_timeout_s(config),
        restarts=restarts,
    )


def finish(
    config: Config,
    folder: RunFolder,
    report: Report,
    *,
    wall_s: float,
    engine_idle: float | None,
    without_tool: float | None,
) -> Summary:
    metrics = MetricsFile(folder.metrics)
    metrics.update()
    with Store.open(folder.store_at(config.store.url)) as store:
        held_out = read_held_out(store)
    curve = [e for e in held_out if e.label != WITHOUT_TOOL]
    summary = Summary.of(
        metrics.rows,
        curve,
        wall_s=wall_s,
        engine_idle=engine_idle,
        without_tool=without_tool,
        changes=FingerprintFile(folder.fingerprint).changes(),
    )
    summary.write(folder.summary)
    plot_rewards(metrics.rows, complete_evaluations(curve), folder.reward_plot)
    report.result(summary, folder)
    return summary
