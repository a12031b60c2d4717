"""The processes of a run: each reads the configuration in the run folder, builds its objects, and runs.

    python -m areal_agents.launch.processes engine|proxy|trainer|rerun|rollout|trial|endpoint --folder DIR

SIGTERM ends each process cleanly, and so does the death of the supervisor that started it. Without a
supervisor, torchrun, srun or Ray can start each rank of the trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from areal_agents.config import Config, load_config
from areal_agents.errors import AgentError, ArealAgentsError, ConfigError, DataError, RewardError
from areal_agents.launch.children import EXIT_REFUSED
from areal_agents.launch.disk_space import disk_space_of
from areal_agents.launch.nodes import rank_variables
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.supervision import EXIT_STOPPED, end_with_supervisor
from areal_agents.model_folder import text_config
from areal_agents.process_control import collect_seldom
from areal_agents.sockets import allow_many_connections
from areal_agents.stacks import answer_with_stacks
from areal_agents.telemetry import exporting
from areal_agents.whole_files import write_whole

if TYPE_CHECKING:
    from areal_agents.inference.engine import Engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one process of a run; return its exit code."""
    parser = argparse.ArgumentParser(prog="areal_agents.launch.processes")
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("--folder", dest="run", type=Path, required=True)
    parser.add_argument(
        "--config", type=Path, help="the configuration; default: config.yaml in the run folder"
    )
    parser.add_argument(
        "--endpoints", type=Path, help="the addresses of the processes; default: endpoints.json in the folder"
    )
    parser.add_argument(
        "--first-version", type=int, default=0, help="rollout: the version that the trainer starts with"
    )
    parser.add_argument("--replica", type=int, default=0, help="engine: the index of the engine")
    parser.add_argument(
        "--gpus", default="", help="engine: the GPUs to compute on, as N,N,...; empty: the CPU"
    )
    parser.add_argument("--evaluate", metavar="LABEL", help="rollout: only evaluate the served weights")
    parser.add_argument(
        "--ablate-tool",
        action="store_true",
        help="rollout, trial, endpoint: use the config's `ablation` agent",
    )
    parser.add_argument(
        "--collects", action="store_true", help="rollout, endpoint: the tasks of eval.data are trained on"
    )
    parser.add_argument("--evaluates", action="store_true", help="trial: play no episode")
    parser.add_argument("--by", action="append", default=[], help="trial: a field of every held-out task")
    options = parser.parse_args(arguments)
    collect_seldom()
    end_with_supervisor()
    rank = os.environ.get("RANK")
    with_logging(options.role if rank is None else f"{options.role}-rank{rank}")
    folder = RunFolder(options.run, options.endpoints)
    try:
        ROLES[options.role](load_config(options.config or folder.config), folder, options)
    except ArealAgentsError as error:
        logging.getLogger(__name__).error("%s: %s", type(error).__name__, error)
        return EXIT_REFUSED if isinstance(error, AgentError | DataError | ConfigError | RewardError) else 1
    return 0


def with_logging(name: str) -> None:
    """Log to standard error, and answer SIGUSR2 with the stacks of this process, which has a name."""
    answer_with_stacks(name)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    for library in ("httpx", "httpx2", "openai", "websockets"):  # the URLs that they log have keys
        logging.getLogger(library).setLevel(logging.WARNING)


def _engine(config: Config, folder: RunFolder, options: argparse.Namespace) -> None:
    from areal_agents.launch.engines import serve_engine

    gpus = [int(gpu) for gpu in options.gpus.split(",") if gpu]
    serve_engine(config, folder, replica=options.replica, gpus=gpus)


def _proxy(config: Config, folder: RunFolder, options: argparse.Namespace) -> None:
    from areal_agents.inference.clients import protocol_of
    from areal_agents.proxy.page import Page
    from areal_agents.proxy.workers.places import ProxyPlace
    from areal_agents.proxy.workers.supervisor import serve_with_workers
    from areal_agents.view.mounted import FACTORY

    endpoints = folder.read_endpoints()
    place = endpoints.place
    settings = config.proxy.for_engines(config.engine.sequences, is_alone=place is None).model_copy(
        update={
            "host": endpoints.proxy_host,
            "port": endpoints.proxy_port,
            "admin_key": endpoints.admin_key,
            "group_size": config.rollout.group_size,
            "reward_timeout_s": _reward_timeout_s(config),
            "routed_experts": config.engine.routed_experts or config.proxy.routed_experts,
            **_of_traffic(config),
        }
    )
    store = folder.store_at(config.store.url)
    serve_with_workers(
        config.model,
        settings,
        store=store,
        durability=config.store,
        engine_urls=endpoints.engine_urls,
        router_url=config.engine.router,
        adapters=config.trainer.publishes_adapters,
        vocab_size=_vocab_size(Path(config.model)),
        protocol=protocol_of(config.engine.kind),
        engine_key=endpoints.engine_key,
        page=Page(FACTORY, str(store), config.model, str(folder.root), endpoints.view_key),
        telemetry=config.telemetry,
        run=config.name,
        place=None if place is None else ProxyPlace(place.index, place.epoch, place.count, place.secret),
        tls=None if place is None else config.cluster.tls,
    )


def _of_traffic(config: Config) -> dict[str, object]:
    """Return the settings of a proxy whose users' conversations are trained on; empty for other runs."""
    if not config.data.traffic:
        return {}
    canary = config.rollout.canary
    share = 0.0 if canary is None else canary.share
    return {"implicit_split": "train", "implicit_groups": True, "canary_share": share}


def _canary_engines(config: Config, engines: Sequence[Engine]) -> tuple[str, ...]:
    """Return the URLs of the engines that serve candidates; () without a canary, and on other ranks."""
    from areal_agents.inference.pool import canary_engines

    canary = config.rollout.canary
    urls = [engine.base_url for engine in engines]
    return canary_engines(urls, canary.share) if canary is not None and urls else ()


def _reward_timeout_s(config: Config) -> float:
    """Return how long an ended episode waits for its reward.

    With a reward function of groups, the first episode of a group waits for the last one with its retries.
    """
    timeout_s = config.proxy.reward_timeout_s
    if config.reward is None or not config.reward.group:
        return timeout_s
    attempts = config.rollout.retries + 1
    return timeout_s + config.rollout.limits.time_s * attempts + config.reward.time_s


def _vocab_size(model: Path) -> int | None:
    """Return the vocabulary size in the model folder's config.json, or None if it has none."""
    try:
        size = text_config(model).get("vocab_size")
    except (OSError, ConfigError):  # the process that loads the model reports the error
        return None
    return size if isinstance(size, int) else None


def _trainer(config: Config, folder: RunFolder, options: argparse.Namespace) -> None:
    from areal_agents.inference.clients import EngineClient, connect, protocol_of
    from areal_agents.inference.pool import following_engines
    from areal_agents.inference.sglang.server import nccl_environment
    from areal_agents.launch.canary_rules import canary_rules
    from areal_agents.launch.context_length import longest_sequence
    from areal_agents.launch.dtypes import with_trainer_dtype
    from areal_agents.launch.engine_memory import engine_bytes_in_training, engine_gpus
    from areal_agents.launch.engines import (
        check_nccl,
        check_same_machine,
        memory_to_release,
        wait_for_engines,
    )
    from areal_agents.launch.gpus import Machine
    from areal_agents.launch.waiting import WaitLines
    from areal_agents.launch.weight_fetcher import wait_for_fetchers
    from areal_agents.rollout.runner import end_of_data
    from areal_agents.store import Store
    from areal_agents.training.batches.recorded import RecordedGroups, recorded_store
    from areal_agents.training.distributed import own_gpus, own_nccl
    from areal_agents.training.run import run

    stop = _stop_event()
    config, longest = with_trainer_dtype(config), longest_sequence(config)
    os.environ.update(rank_variables(config.trainer, os.environ))  # torch reads them
    if config.engine.kind != "embedded":
        os.environ.update(nccl_environment(config.engine))  # the trainer may form a group with the engines
    first = int(os.environ.get("RANK", "0")) == 0
    if first:
        check_nccl(config, own_nccl())
        check_same_machine(config)
    store = recorded = None
    data_ended: Callable[[], bool] = _never
    engines: list[EngineClient] = []
    elsewhere = 0
    with ExitStack() as opened:
        if first:
            store = opened.enter_context(
                Store.open(folder.store_at(config.store.url), config.store.durability)
            )
        if first and config.data.episodes:
            source = opened.enter_context(Store.open(recorded_store(config.data.episodes)))
            seed = config.seed if config.data.seed is None else config.data.seed
            split = config.data.split
            recorded = RecordedGroups.read(source, seed=seed, split="eval" if split == "eval" else "train")
            recorded.refuse_imported(config.algorithm)
            if (fewer := recorded.fewer_than(config.rollout.groups)) is not None:
                logging.getLogger(__name__).warning(fewer)
        elif config.trainer.publish.transport == "object_storage" and store is not None:
            elsewhere = config.engine.replicas
            wait_for_fetchers(
                store,
                elsewhere,
                timeout_s=config.engine.start_timeout_s,
                check=lambda: _end_if(stop),
                wait=WaitLines(logging.getLogger(__name__).info),
            )
        elif first:
            endpoints, log = folder.read_endpoints(), logging.getLogger(__name__)
            urls, key = endpoints.engine_urls, endpoints.engine_key
            wait_for_engines(
                config,
                urls,
                check=lambda: _end_if(stop),
                wait=WaitLines(log.info),
                warn=log.warning,
                key=key,
            )
            timeout_s = config.trainer.publish.timeout_s
            protocol = protocol_of(config.engine.kind)
            engines = [connect(url, protocol, key=key, update_timeout_s=timeout_s) for url in urls]
            if endpoints.place is not None and (held := store) is not None:
                opened.enter_context(following_engines(engines, lambda: held.addresses("engine")))
        if store is not None and recorded is None and config.loop == "one_step_off":
            data_ended = end_of_data(config.data, store, seed=config.seed)
        by_ipc = config.trainer.publish.transport == "ipc"
        spans = None
        if first:
            spans = opened.enter_context(exporting(config.telemetry, "trainer", run=config.name))
        result = run(
            config.trainer,
            config.algorithm,
            store=store,
            engines=engines,
            model_path=config.model,
            run_dir=folder.root,
            spans=spans,
            groups=config.rollout.groups,
            max_staleness=config.rollout.max_staleness,
            on_stale=config.rollout.on_stale,
            lag=config.rollout.lag or 0,
            swap_between_batches=config.loop == "one_step_off",
            data_ended=data_ended,
            released=memory_to_release(config),
            engine_bytes=partial(engine_bytes_in_training, config),
            engines_elsewhere=elsewhere,
            engine_gpus=engine_gpus(config, Machine(own_gpus(), 0)) if engines and by_ipc else (),
            longest_sample=longest.wanted if longest is not None else 0,
            stop=stop,
            seed=config.seed,
            recorded=recorded,
            evaluates=config.eval is not None and config.eval.every is not None,
            of_traffic=config.data.traffic,
            canary=canary_rules(config.rollout.canary),
            canary_engines=_canary_engines(config, engines),
        )
    if not result.finished:
        raise SystemExit(EXIT_STOPPED)


def _rerun(config: Config, folder: RunFolder, options: argparse.Namespace) -> None:
    from areal_agents.launch.context_length import longest_sequence
    from areal_agents.launch.dtypes import with_trainer_dtype
    from areal_agents.rerun.record import RerunRecord, rewards_in, start_checkpoint
    from areal_agents.store import Store
    from areal_agents.store.read_only import ReadOnlyStore
    from areal_agents.training.batches.stored_steps import StoredSteps
    from areal_agents.training.checkpoint.resuming import Start
    from areal_agents.training.run import run

    stop = _stop_event()
    config, longest = with_trainer_dtype(config), longest_sequence(config)
    record = RerunRecord.read(folder)
    start = Start(start_checkpoint(record), record.step, record.version, record.until)
    store = stored = None
    with ExitStack() as opened:
        if int(os.environ.get("RANK", "0")) == 0:
            store = opened.enter_context(Store.open(folder.store))
            original = opened.enter_context(contextlib.closing(ReadOnlyStore(record.store)))
            stored = StoredSteps.read(
                original,
                max_staleness=config.rollout.max_staleness,
                rewards=rewards_in(folder) if record.new_rewards else None,
            )
        result = run(
            config.trainer,
            config.algorithm,
            store=store,
            engines=(),
            model_path=config.model,
            run_dir=folder.root,
            groups=config.rollout.groups,
            max_staleness=config.rollout.max_staleness,
            on_stale=config.rollout.on_stale,
            longest_sample=longest.wanted if longest is not None else 0,
            stop=stop,
            seed=config.seed,
            start=start,
            stored=stored,
        )
    if not result.finished:
        raise SystemExit(EXIT_STOPPED)


def _rollout(config: Config, folder: RunFolder, options: argparse.Namespace) -> None:
    allow_many_connections()
    endpoints = folder.read_endpoints()
    # For agents with a module-level client: all episodes have this URL, and the key is `current_key`.
    os.environ["OPENAI_BASE_URL"] = endpoints.proxy_url + "/v1"
    asyncio.run(_collect(config, folder, options))


def _endpoint(config: Config, folder: RunFolder, options: argparse.Namespace) -> None:
    asyncio.run(_play_endpoint(config, folder, options))


def _trial(config: Config, folder: RunFolder, options: argparse.Namespace) -> None:
    from areal_agents.launch.trial import play_trial

    play_trial(config, folder, ablate_tool=options.ablate_tool, evaluates=options.evaluates, by=options.by)


async def _collect(config: Config, folder: RunFolder, options: argparse.Namespace) -> None:
    from areal_agents.evaluation.folder import EvaluationFolder
    from areal_agents.launch.agent_jobs import owner_of_jobs
    from areal_agents.launch.context_length import told_of_context
    from areal_agents.launch.fingerprint import Fingerprint, FingerprintFile, notice_of
    from areal_agents.rollout.agents.blocking import BlockingWatch
    from areal_agents.rollout.runner import evaluate, held_out_tasks, run
    from areal_agents.rollout.sandbox_hosts import hosts_of_run
    from areal_agents.rollout.worker_share import WorkerShare
    from areal_agents.store import Store

    def notify(text: str) -> None:
        logging.getLogger(__name__).error(text)
        write_whole(folder.notice, text)

    agent = told_of_context(config, config.agent)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    endpoints, rollout = folder.read_endpoints(), config.rollout.for_engines(config.engine.sequences)
    with (
        Store.open(folder.store_at(config.store.url), config.store.durability) as store,
        BlockingWatch(notify, adds_up=True),
    ):
        fingerprint = Fingerprint.of(config)
        owner = owner_of_jobs(config, folder.root, endpoints.place)
        if options.evaluate is None:
            latest = store.latest_version()
            file = FingerprintFile(folder.fingerprint)
            place = endpoints.place
            worker = hosts = None
            if place is not None and config.cluster.sandboxes:
                hosts = hosts_of_run(store, place.secret)
            if place is not None:
                worker = WorkerShare.of_place(store, index=place.index, count=place.count, epoch=place.epoch)
            # The supervisor has recorded its start, but files may change before this process starts.
            is_first = place is None or place.index == 0
            if is_first and (changes := file.record(fingerprint, step=latest.step if latest else 0)):
                notify(notice_of(changes))
            elif since := file.changes().get(fingerprint.digest):
                logging.getLogger(__name__).warning("%s: evaluations are compared since then", since)
            await run(
                store=store,
                proxy_url=endpoints.proxy_url,
                admin_key=endpoints.admin_key,
                agent=agent,
                data=config.data,
                rollout=rollout,
                evaluation=config.eval,
                steps=config.trainer.steps,
                seed=config.seed,
                first_version=options.first_version,
                shortage=disk_space_of(config, folder).shortage,
                reward=config.reward,
                logs=folder.episode_logs,
                stop=stop,
                fingerprint=fingerprint.digest,
                training_fingerprint=fingerprint.digest_in_training,
                worker=worker,
                # In a cluster that is the address of a forwarder, which lasts when proxies are started again.
                agents_url=endpoints.proxy_url if place and config.proxy.public_url is None else None,
                hosts=hosts,
                job_owner=owner,
            )
            if stop.is_set():
                raise SystemExit(EXIT_STOPPED)
            return
        if config.eval is None:
            raise ConfigError("there is nothing to evaluate on: the config has no eval.data; add it")
        tasks = held_out_tasks(config.eval)
        if (files := EvaluationFolder(folder.root)).identity.exists():
            files.keep_tasks(tasks)
        ablated = config.ablation if options.ablate_tool and config.ablation else None
        await evaluate(
            store=store,
            proxy_url=endpoints.proxy_url,
            admin_key=endpoints.admin_key,
            agent=ablated or agent,
            rollout=rollout,
            evaluation=config.eval,
            label=options.evaluate,
            seed=config.seed,
            reward=config.reward,
            logs=folder.episode_logs,
            stop=stop,
            tasks=tasks,
            fingerprint=fingerprint.digest,
            split="train" if options.collects else "eval",
            job_owner=owner,
        )
        if stop.is_set():
            raise SystemExit(EXIT_STOPPED)


async def _play_endpoint(config: Config, folder: RunFolder, options: argparse.Namespace) -> None:
    from areal_agents.evaluation.endpoint.play import ENDPOINT, Endpoint, play
    from areal_agents.evaluation.folder import EvaluationFolder
    from areal_agents.rollout.runner import held_out_tasks, unless_stopped

    assert config.eval is not None, "the evaluation has checked that there are tasks"
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    endpoint = Endpoint(**json.loads((folder.root / ENDPOINT).read_text()))
    tasks = held_out_tasks(config.eval)
    EvaluationFolder(folder.root).keep_tasks(tasks)
    ablated = config.ablation if options.ablate_tool and config.ablation else None
    playing = play(
        endpoint,
        folder.root,
        tasks,
        model=Path(config.model),
        agent=ablated or config.agent,
        rollout=config.rollout,
        evaluation=config.eval,
        reward=config.reward,
        seed=config.seed,
        logs=folder.episode_logs,
        split="train" if options.collects else "eval",
    )
    await unless_stopped(playing, stop)
    if stop.is_set():
        raise SystemExit(EXIT_STOPPED)


def _never() -> bool:
    return False


def _end_if(stop: threading.Event) -> None:
    if stop.is_set():
        raise SystemExit(EXIT_STOPPED)


def _stop_event() -> threading.Event:
    """Return an event that SIGTERM sets."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    return stop


ROLES: dict[str, Callable[[Config, RunFolder, argparse.Namespace], None]] = {
    "engine": _engine,
    "proxy": _proxy,
    "trainer": _trainer,
    "rerun": _rerun,
    "rollout": _rollout,
    "endpoint": _endpoint,
    "trial": _trial,
}

if __name__ == "__main__":
    raise SystemExit(main())
