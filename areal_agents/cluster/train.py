"""`areal-agents train --launcher`: the supervisor of a run on several machines.

It does what the supervisor of a run on one machine does, and a launcher places the processes. It has no state
of its own: it can be ended and started again on any machine that sees the run folder and the store.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from areal_agents.cluster.follow import take_places_away
from areal_agents.cluster.launchers.base import Launcher, RoleProcess
from areal_agents.cluster.place import Place, address_for_store
from areal_agents.cluster.role import counts, engine_gpus, wait_for_addresses
from areal_agents.cluster.run_record import RunKeys, RunRecord, text_of
from areal_agents.config import Config, save_config
from areal_agents.errors import ConfigError
from areal_agents.launch.agent_jobs import NO_TRIAL, check_jobs
from areal_agents.launch.agent_sandbox import sandboxed_agent
from areal_agents.launch.children import Children
from areal_agents.launch.report.report import Form, Report, report_of
from areal_agents.launch.run_folder import Endpoints, RunFolder
from areal_agents.launch.signals import interruptible
from areal_agents.launch.stopping import stop_timeout_s
from areal_agents.launch.summary import Summary
from areal_agents.launch.supervision import end_with_supervisor
from areal_agents.launch.train import (
    finish,
    has_ended,
    report_resume,
    threads_for,
    wait_until_serving,
    watch_training,
    without_place,
)
from areal_agents.launch.trial import run_trial
from areal_agents.launch.weight_fetcher import check_location, wait_for_fetchers
from areal_agents.proxy.page import link_of_page
from areal_agents.rollout.agent_variables import agent_variables
from areal_agents.rollout.config import job_of_agent
from areal_agents.secret_variables import RUN_TOKEN, given_engine_key, take_token
from areal_agents.store import Store
from areal_agents.store.postgres import has_password, is_postgres
from areal_agents.store.roles import DEAD_AFTER_S
from areal_agents.store.urls import shown_store
from areal_agents.tls import trusting
from areal_agents.training.metrics.trackers import check_trackers

_ROLE_STOP_S = DEAD_AFTER_S  # on top of what its child may take


def train_on_cluster(
    config: Config, launcher: Launcher, *, console: Console, fresh: bool = False, form: Form = "auto"
) -> Summary:
    """Train the run that `config` describes to its last step, on the machines of a launcher.

    Args:
        fresh: set an earlier run in the same folder aside instead of resuming it.
        form: how the run is shown, see `report_of`.

    Raises:
        ConfigError: the configuration cannot be run on several machines, or the launcher cannot be used.
        ChildDied: a process ended too often.
        Interrupted: the user stopped the run; all processes have been ended.
    """
    token = take_token()
    end_with_supervisor()
    check_config(config, launcher)
    check_jobs(config, launcher=launcher.name)
    check_trackers(config.trainer.trackers)
    launcher.check()
    check_location(config.trainer.publish)
    nodes = max(1, config.trainer.nodes)
    report = report_of(config, console, form)
    config = without_place(config)
    folder = RunFolder(Path(config.run_dir))
    for earlier in folder.set_aside(config.store.url) if fresh else ():
        report.say(f"the earlier run is kept in {earlier}")
    with folder.locked(config.store.url), interruptible():
        if has_ended(config, folder):
            report.say(
                f"{folder.root} is finished; raise trainer.steps to continue, or use --fresh to start over"
            )
            summary = Summary.read(folder.summary)
            report.result(summary, folder)
            return summary
        folder.summary.unlink(missing_ok=True)  # until this run ends, it has no summary
        has_changed = report_resume(config, folder, report)
        save_config(config, folder.config)
        if not is_postgres(config.store.url or ""):
            report.say("the store is a SQLite file, which only the processes of this machine can share")
        if config.cluster.sandboxes:
            report.say("no trial episode is played: the machines of its sandbox are not reached yet")
        elif config.trial and job_of_agent(config.agent) is not None:
            report.say(NO_TRIAL)
        elif config.trial and config.agent and (has_changed or not folder.metrics.exists()):
            run_trial(folder, say=report.say, ablate_tool=False)
        url = str(folder.store_at(config.store.url))
        with (
            Store.open(url, config.store.durability) as store,
            Place.claim(store, "supervisor", 0, host=address_for_store(url)) as place,
            # What something else starts may be on other machines only, and this one serves nothing.
            trusting(config.cluster.tls, serves=launcher.name != "external"),
        ):
            run = _ClusterRun(config, folder, store, url, launcher, nodes, report, place.row.epoch, token)
            begun = time.monotonic()
            try:
                idle = run.train()
            finally:
                wall_s = folder.add_wall_s(time.monotonic() - begun)
        return finish(config, folder, report, wall_s=wall_s, engine_idle=idle, without_tool=None)


def check_config(config: Config, launcher: Launcher) -> None:
    """Raise ConfigError, with what to do, for a configuration that cannot be run on several machines."""
    for fault in _faults(config, launcher):
        raise ConfigError(fault)


def _faults(config: Config, launcher: Launcher) -> Iterator[str]:
    trainer, engine = config.trainer, config.engine
    if launcher.name != "local" and not is_postgres(config.store.url or ""):
        yield (
            "store.url: the machines of a cluster share a store in PostgreSQL; set it to "
            "postgresql://user@host/database?schema=NAME (docs/async.md)"
        )
    elif is_postgres(config.store.url or "") and has_password(config.store.url or ""):
        yield (
            "store.url: the command lines of the processes would show its password; leave it out, and give "
            "it in ~/.pgpass or as the variable PGPASSWORD"
        )
    if config.data.episodes:
        yield "data.episodes: training on recorded episodes needs no cluster; leave --launcher out"
    if config.data.traffic:
        yield "data.traffic is for one machine so far; leave --launcher out"
    if config.proxy.workers > 1:
        yield (
            "proxy.workers: in a cluster each proxy is one process; leave it out, and set cluster.proxies to "
            "the number of proxies"
        )
    if not trainer.start:
        yield "trainer.start: with --launcher, the launcher starts the trainer; leave it out"
    if config.cluster.sandboxes and sandboxed_agent(config) is None:
        yield (
            "cluster.sandboxes: the agent of this run runs in no sandbox; give it an isolation, or leave "
            "cluster.sandboxes out"
        )
    if config.cluster.kubernetes.tls_secret and config.cluster.tls is None:
        yield (
            "cluster.kubernetes.tls_secret has the certificates of pods, and this launcher starts none, so "
            "its processes would serve plain HTTP; give the files of its machines as cluster.tls, or leave "
            "cluster.kubernetes.tls_secret out"
        )
    if engine.colocate != "none":
        yield "engine.colocate: in a cluster, engines and trainer have GPUs of their own; leave it out"
    if trainer.publish.transport == "ipc":
        yield "trainer.publish.transport: ipc is for engines on the trainer's GPUs; use broadcast or disk"


class _ClusterRun:
    """The processes of one start of a run."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        store: Store,
        url: str,
        launcher: Launcher,
        nodes: int,
        report: Report,
        epoch: int,
        token: str,
    ) -> None:
        self._epoch = epoch
        self._config = config
        self._folder = folder
        self._store = store
        self._url = url
        self._launcher = launcher
        self._nodes = nodes
        self._report = report
        # Only processes that something else starts have to be given a token.
        is_external = launcher.name == "external"
        self._token = token or ("" if is_external else secrets.token_urlsafe(24))

    def train(self) -> float | None:
        """Run every process until the last step is trained and evaluated; return the engines' idle share."""
        config, folder, store, report = self._config, self._folder, self._store, self._report
        folder.notice.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix="areal-agents-") as own:
            text = text_of(config, Path(own))
        record = RunRecord.of(
            text,
            nodes=self._nodes,
            first_version=store.max_version() + 1,
            token=self._token,
            engine_key=given_engine_key() if config.engine.urls else "",
            epoch=self._epoch,
        )
        keys = record.keys(self._token, config)
        record.write(store)
        if self._launcher.name == "external":
            take_places_away(store, processes_of(config, self._url, nodes=self._nodes))
        if not self._token:
            report.event(
                f"{RUN_TOKEN} is not set, so the store has the keys of the run, and who can read it can take "
                "part (docs/security.md)"
            )
        if self._launcher.name != "local" and ip_address(address_for_store(self._url)).is_loopback:
            report.event(
                "warning: this machine reaches the store at a loopback address, where other machines do not "
                "reach its processes; name the store by its address in the network"
            )
        report.say(f"store: {shown_store(self._url)}; logs of all processes: {folder.log('trainer').parent}")
        with Children(say=report.event, events=folder.process_events) as children, report:
            names = self._start(children)
            ending = [name for name in names if name.partition("-")[0] in ("trainer", "rollout")]
            endpoints = self._addresses(children, keys)
            folder.write_endpoints(endpoints)
            in_storage = config.trainer.publish.transport == "object_storage"
            if in_storage:  # engines may be out of reach here
                wait_for_fetchers(
                    store,
                    config.engine.replicas,
                    timeout_s=config.engine.start_timeout_s,
                    check=children.check,
                    wait=report.wait,
                )
            else:
                wait_until_serving(config, endpoints, children, wait=report.wait, warn=report.event)
            link = link_of_page(endpoints.local_url, endpoints.view_key)
            report.say(f"the run in a browser, while it trains: {link}")
            report.stage("waiting for the trainer's first version")
            return watch_training(
                config,
                endpoints,
                folder,
                children,
                report,
                store,
                engines=() if in_storage else endpoints.engine_urls,
                ending=ending,
                has_ended=lambda: all(children.finished(name) for name in ending),
                places=[
                    (process.role, process.index)
                    for process in processes_of(config, self._url, nodes=self._nodes)
                ],
            )

    def _start(self, children: Children) -> list[str]:
        """Start every process, and return their names."""
        names = []
        for process in processes_of(self._config, self._url, nodes=self._nodes):
            self._report.say(f"{process.name}: {self._launcher.name}")
            children.start(
                process.name,
                (),
                program=self._launcher.command(process),
                log=self._folder.log(process.name),
                environment=self._environment(process),
                restarts=True,
                stop_timeout_s=stop_s_of(process, self._config),
            )
            names.append(process.name)
        return names

    def _environment(self, process: RoleProcess) -> Mapping[str, str]:
        is_started_here = self._launcher.name != "external"
        token = {RUN_TOKEN: self._token} if self._token and is_started_here else {}
        own = {**environment_of(process), **token}
        if self._launcher.name != "local":
            return own
        return {**own, **threads_for(process.role, engines=self._config.engine.replicas)}

    def _addresses(self, children: Children, keys: RunKeys) -> Endpoints:
        """Wait until engines and proxies have addresses, and return them."""

        def is_over() -> bool:
            children.check()
            return False

        config = self._config
        say = self._report.stage
        engines = config.engine.urls or wait_for_addresses(
            self._store, "engine", config.engine.replicas, is_over=is_over, say=say
        )
        proxies = wait_for_addresses(self._store, "proxy", config.cluster.proxies, is_over=is_over, say=say)
        assert engines is not None and proxies is not None, "the wait ends only with them, or an error"
        first = urlsplit(proxies[0])
        return Endpoints(
            tuple(engines),
            first.hostname or "",
            first.port or 80,
            keys.admin,
            keys.view,
            keys.engine,
            scheme=first.scheme,
            authority="" if (tls := self._config.cluster.tls) is None else tls.authority,
        )


def environment_of(process: RoleProcess) -> dict[str, str]:
    """Return the variables of a process that has its cores on a machine for itself."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    agents = agent_variables() if process.role == "rollout" else {}
    return {**dict.fromkeys(names, str(process.cpus)), "TOKENIZERS_PARALLELISM": "false", **agents}


def stop_s_of(process: RoleProcess, config: Config) -> float:
    """Return the longest time in seconds from SIGTERM until a process is killed."""
    return _ROLE_STOP_S + (stop_timeout_s(config) if process.role == "trainer" else 0)


def processes_of(config: Config, store_url: str, *, nodes: int) -> list[RoleProcess]:
    """Return every process of a run, in the order in which they are started.

    Args:
        nodes: the number of processes of the trainer.
    """
    gpus = {"engine": engine_gpus(config), "trainer": _trainer_gpus(config) // nodes}
    cpus = config.cluster.cpus
    number = counts(config, nodes)
    return [
        RoleProcess(
            role,
            index,
            (sys.executable, "-m", "areal_agents", "role", role, "--run", store_url, "--index", str(index)),
            gpus=gpus.get(role, 0),
            cpus=getattr(cpus, role),
        )
        for role in ("engine", "proxy", "sandbox", "trainer", "rollout")
        for index in range(number[role])
    ]


def _trainer_gpus(config: Config) -> int:
    on_cpu = config.trainer.device == "cpu" or config.cluster.gpus_per_node == 0
    return 0 if on_cpu else config.trainer.ranks
