"""Complete runs of the loop for `python -m benchmarks async`, each timed over its steady part.

A run is `areal-agents train` as users start it: engine, proxy, agents and trainer in their own processes. The
first steps, in which the queue fills, and the start-up time are not counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from areal_agents.config import Config, save_config, validate_config
from areal_agents.errors import TrainingError
from areal_agents.inference import SGLangEngine
from areal_agents.launch.children import Children
from areal_agents.launch.engines import plan_engines
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.run_folder import Endpoints, RunFolder
from areal_agents.launch.train import chosen_endpoints, start_serving, threads_for, train, wait_until_serving
from areal_agents.store import Store
from areal_agents.training.publish.disk import swap
from benchmarks.asynchrony.agent import workload_file

log = logging.getLogger(__name__)

AGENT = "benchmarks.asynchrony.agent:agent"
LONG_AGENT = "benchmarks.asynchrony.agent:long_agent"
TASKS = "benchmarks.asynchrony.agent:tasks"
ROLLOUT_TIMEOUT_S = 300.0
LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    """Means per step over the steady part of a run.

    Attributes:
        step_s: time between the ends of two steps. work_s: the part of it in which the trainer did not wait
            for groups, publishing included.
        trainer_idle, rollout_idle: share of the time in which the trainer waited for groups, and share in
            which the engine sampled nothing.
        tokens: number of sampled tokens in a batch.
        pause_s: time in which the engine was paused for a swap.
        staleness: mean over the trained tokens; staleness_max: the largest.
        failed: number of episodes of the whole run that failed or were lost.
    """

    step_s: float
    work_s: float
    trainer_idle: float
    rollout_idle: float
    tokens: float
    pause_s: float
    staleness: float
    staleness_max: int
    failed: int


def run_config(
    model: Path, folder: Path, changes: Mapping[str, Any], *, agent: str = AGENT, section: str = ""
) -> Config:
    """The configuration of the workload file's run on `model`, in `folder`, with `changes`
    ({"trainer.threads": 1, …}). `section` of the file overrides its `run`.
    """
    sections = yaml.safe_load(workload_file().read_text())
    tree = sections["run"]
    for name, settings in (sections[section] if section else {}).items():
        tree[name] |= settings
    tree |= {"name": folder.name, "run_dir": str(folder), "model": str(model)}
    tree |= {"agent": agent, "data": {"path": TASKS}}
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return validate_config(tree, source="bench async")


def measure_loop(config: Config, *, warm_up: int) -> Measured:
    """Train `config` to its end, and summarise the steps after the first `warm_up`.

    Raises:
        ChildDied: a process of the run ended unexpectedly.
    """
    folder = RunFolder(Path(config.run_dir))
    with open(folder.root.with_suffix(".log"), "a") as output:
        train(config, console=Console(file=output, width=200), fresh=True)
    metrics = MetricsFile(folder.metrics)
    metrics.update()
    with Store.open(folder.store_at(config.store.url)) as store:
        failed = store.episodes(split="train", status="failed")
    for episode in failed:
        log.warning("episode %s of group %s failed: %s", episode.id, episode.group_id, episode.error)
    return steady(metrics.rows, warm_up=warm_up, failed=len(failed))


def steady(rows: Sequence[Mapping[str, Any]], *, warm_up: int, failed: int) -> Measured:
    """The figures of the steps after the first `warm_up`; at least two such steps are required."""
    if len(rows) < warm_up + 2:
        raise TrainingError(f"{len(rows)} steps were trained, but {warm_up} + 2 are needed")
    counted = rows[warm_up:]
    span = counted[-1]["time"] - rows[warm_up - 1]["time"] if warm_up else sum(r["step_s"] for r in counted)
    trained = sum(row["tokens"] for row in counted)

    def mean(name: str) -> float:
        return sum(row[name] or 0.0 for row in counted) / len(counted)

    return Measured(
        step_s=span / len(counted),
        work_s=mean("step_s") - mean("wait_s"),
        trainer_idle=mean("wait_s") / mean("step_s"),
        rollout_idle=mean("rollout_idle"),
        tokens=mean("sampled_tokens"),
        pause_s=mean("pause_s"),
        staleness=sum(row["staleness_mean"] * row["tokens"] for row in counted) / max(1, trained),
        staleness_max=max(row["staleness_max"] for row in counted),
        failed=failed,
    )


def measure_rollout(config: Config, *, batches: int, warm_up: int) -> tuple[float, int]:
    """Measure the seconds per batch of the rollout side alone; also return how many episodes failed.

    Groups are taken as soon as a batch is complete.

    Nothing is trained. After every batch the engine receives weights as it does from a trainer, always the
    same ones, in the mode that `trainer.publish.pause` selects: running requests are recomputed or waited
    for.

    Raises:
        TrainingError: the batches were not complete in time.
        ChildDied: a process of the run ended.
        EngineError: the engine does not answer.
    """
    folder = RunFolder(Path(config.run_dir))
    folder.set_aside()
    with folder.locked(), chosen_endpoints(config) as endpoints, Children() as children:
        save_config(config, folder.config)
        folder.write_endpoints(endpoints)
        with Store.open(folder.store_at(config.store.url)) as store:
            start_serving(config, folder, children, plan_engines(config))
            wait_until_serving(config, endpoints, children, wait=lambda *_: None, warn=print)
            store.publish_version(0, step=0, path=config.model)
            children.start(
                "rollout", ["rollout", "--folder", str(folder.root), "--first-version", "0"],
                log=folder.log("rollout"), environment=threads_for("rollout"),
            )  # fmt: skip
            ends = []
            for step in range(1, warm_up + batches + 1):
                ends.append(_take(store, children, config, step=step))
                asyncio.run(_swap(endpoints, config, version=step))
            failed = len(store.episodes(split="train", status="failed"))
    return (ends[-1] - ends[warm_up - 1]) / batches, failed


def _take(store: Store, children: Children, config: Config, *, step: int) -> float:
    """Take one batch off the queue and publish as if it were trained; return when it was taken."""
    deadline = time.monotonic() + ROLLOUT_TIMEOUT_S
    while not (ids := store.lease_group_ids(config.rollout.groups, step=step)):
        children.check()
        if time.monotonic() > deadline:
            raise TrainingError(f"batch {step} was not complete within {ROLLOUT_TIMEOUT_S:g} s")
        time.sleep(LOOK_S)
    taken = time.monotonic()
    store.publish_version(step, step=step, path=config.model)
    store.mark_trained(ids, step=step, version=step)
    return taken


async def _swap(endpoints: Endpoints, config: Config, *, version: int) -> None:
    engine = SGLangEngine(endpoints.engine_urls[0], key=endpoints.engine_key)
    try:
        await engine.prepare_weights_from_disk(config.model)
        await swap(engine, config.model, version, pause=config.trainer.publish.pause)
    finally:
        await engine.aclose()
