"""Runs the training, from loading the models to exporting the final folder; `loop` contains the loop.

A resumed run continues from the step of its checkpoint, returns the leases of later steps, and publishes
under a version above every earlier one.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.core.rollout import OnStale
from areal_agents.inference.engine import Engine, MemoryKind
from areal_agents.inference.expert_routing import expert_layout
from areal_agents.store import Store
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.recorded import RecordedGroups
from areal_agents.training.batches.source import BatchSource, Recorded, RolledOut
from areal_agents.training.batches.stored_steps import RerunBatches, StoredSteps
from areal_agents.training.canary.controller import Canary
from areal_agents.training.canary.judging import CanaryRules
from areal_agents.training.canary.resuming import resume_canary
from areal_agents.training.checkpoint.best import BestMetric, metric_name
from areal_agents.training.checkpoint.checkpoint import Checkpoints
from areal_agents.training.checkpoint.export import facts_of, write_final
from areal_agents.training.checkpoint.resuming import Start, resume
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks, use_threads
from areal_agents.training.distributed import ranks as join_ranks
from areal_agents.training.loop import TrainingLoop
from areal_agents.training.memory.choices import settle
from areal_agents.training.metrics.step_metrics import MetricsWriter
from areal_agents.training.model.model import Policy
from areal_agents.training.model.run_models import load_models
from areal_agents.training.publish.publisher import Publisher
from areal_agents.training.publish.storage_publisher import StoragePublisher
from areal_agents.training.records.writer import RecordWriter, drop_steps_after
from areal_agents.training.step.step import StepOptions
from areal_agents.training.step.teacher import EngineTeacher

if TYPE_CHECKING:
    from areal_agents.telemetry.spans import Spans

_ENDING_TRAINER_S = 60.0  # longest wait for the trainer of an earlier process run to end


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a training run.

    Attributes:
        step: number of batches trained, those before a resume included. version: the last version published.
        finished: False if the run was stopped before its last step.
    """

    step: int
    version: int
    finished: bool


def run(
    config: TrainerConfig,
    algorithm: AlgorithmConfig,
    *,
    store: Store | None,
    engines: Sequence[Engine],
    model_path: str | Path,
    run_dir: str | Path,
    groups: int,
    max_staleness: int | None,
    stop: threading.Event,
    on_stale: OnStale = "mask",
    lag: int = 0,
    swap_between_batches: bool = False,
    released: Sequence[MemoryKind] = (),
    engine_bytes: Callable[[int], int] = lambda memory: 0,
    engine_gpus: Sequence[Sequence[int]] = (),
    engines_elsewhere: int = 0,
    longest_sample: int = 0,
    seed: int = 0,
    recorded: RecordedGroups | None = None,
    start: Start | None = None,
    stored: StoredSteps | None = None,
    evaluates: bool = False,
    data_ended: Callable[[], bool] = lambda: False,
    of_traffic: bool = False,
    canary: CanaryRules | None = None,
    canary_engines: Collection[str] = (),
    spans: Spans | None = None,
) -> RunResult:
    """Train until `config.steps` batches are done, or `stop` is set. An interrupted run is resumed
    automatically.

    Under torchrun every rank calls this function; only the first rank passes a store, engines, recorded
    groups and stored steps.

    Args:
        store: the store of the run.
        engines: the replicas that versions are published to. With `recorded` groups there are none, and
            weights are written only to checkpoints and to `final`.
        groups: groups per batch.
        max_staleness: η, the hard bound on the staleness of a trained token; None: no bound. Every token of
            recorded groups is trained; the weight π_prox/μ corrects for the policy that sampled it.
        stop: ends the run with a checkpoint, either between micro-batches or, once the batch's first
            optimizer step has been taken, after the batch.
        on_stale: how tokens beyond the bound are treated, see `algorithms.staleness`.
        lag: how many further batches must be complete before one is trained on, for experiments.
        swap_between_batches: publish a version only when the batch that is being generated is complete.
        released: the kinds of memory that the engines release while a step is trained.
        engine_bytes: given the bytes of a GPU, returns those that engines hold of this rank's GPU while a
            step is trained.
        engine_gpus: the GPUs of each of `engines`, on the machine whose GPU r is that of rank r; empty if
            they are not known.
        engines_elsewhere: instead of `engines`, the number of those that read versions from the object
            storage of `config.publish`.
        longest_sample: tokens that a micro-batch should hold, if the configuration says it; 0: not known.
        recorded: groups of another store to train on, instead of groups of a rollout.
        start: where a rerun starts and ends, on every rank; the run folder is then a new one, which is not
            resumed.
        stored: the steps of another run whose batches a rerun trains on.
        evaluates: whether held-out evaluations are written to the store during training.
        data_ended: returns whether all groups of the data have started, so that with `swap_between_batches`
            an incomplete last batch is not waited for.
        of_traffic: whether the groups are conversations of users, which come at any time or never: no batch
            is late then, and none is taken while the operator has frozen the run.
        canary: how versions are compared before all engines serve them; None: they are not.
        canary_engines: with `canary`, the URLs of the engines that serve candidates.
        spans: exports a span for each step and each publication; None: they are not exported.

    Raises:
        TrainingError: the model or checkpoint cannot be used, groups did not come in time, or too many
            of them cannot be trained on.
        EngineError: no engine takes the weights, or the weights of an engine differ from those published.
        StoreError: the store is unusable.
    """
    use_threads(config.threads)
    torch.manual_seed(seed)
    model_path, run_dir = Path(model_path), Path(run_dir)
    with (
        join_ranks(
            config.device,
            timeout_s=config.rank_timeout_s,
            join_timeout_s=config.join_timeout_s,
            facts=_facts(config, algorithm, seed),
            replicas=config.replicas,
            context=config.context_parallel,
        ) as group,
        ExitStack() as at_the_end,
    ):
        if not group.is_first:
            store, engines, engines_elsewhere, recorded, stored = None, (), 0, None, None
        elif (
            store is None
            or sum((bool(engines), bool(engines_elsewhere), recorded is not None, stored is not None)) != 1
        ):
            raise ValueError(
                "the first rank needs a store, and one of engines, engines elsewhere, recorded groups, "
                "stored steps"
            )
        elif (start is None) != (stored is None):
            raise ValueError("a rerun needs both a start and stored steps")
        else:
            store.become_trainer(_ENDING_TRAINER_S)  # before any file of an earlier trainer is changed
        config = settle(
            config, algorithm, model_path, group, engine_bytes=engine_bytes, longest=longest_sample
        )
        publishes = group.broadcast(bool(engines) or bool(engines_elsewhere))
        sleeps = publishes and bool(released)
        parks = sleeps and group.device.type == "cuda" and config.offload != "all"
        models = load_models(config, algorithm, model_path, group, parked=parks)
        options = StepOptions(
            microbatch_tokens=config.microbatch_tokens,
            share_prefixes=config.share_prefixes,
            grad_clip=config.grad_clip,
            downweight_stale=on_stale == "downweight",
            gradients_on_host=config.offload == "all",
            reshard=config.reshard,
            records_tokens=config.record_tokens != "none",
        )
        best = BestMetric(metric_name(config.best_metric, evaluates=evaluates), store)
        checkpoints = _checkpoints(config, group, run_dir, model_path, best, store)
        at_the_end.callback(checkpoints.close)
        publisher: Publisher | StoragePublisher | None = None
        if publishes and config.publish.transport == "object_storage":
            publisher = StoragePublisher(
                config.publish, models.policy, group,
                store=store, run_dir=run_dir, model_path=model_path, keep=config.keep_weights,
                adapters=config.publishes_adapters, engines=engines_elsewhere,
            )  # fmt: skip
        elif publishes:
            publisher = Publisher(
                config.publish, models.policy, group,
                store=store, engines=engines, run_dir=run_dir, model_path=model_path,
                keep=config.keep_weights, engine_gpus=engine_gpus, canary=canary_engines,
            )  # fmt: skip
        if publisher is not None:
            at_the_end.callback(publisher.close)
        judged = None
        if canary is not None:
            if not isinstance(publisher, Publisher):
                raise ValueError("a canary needs engines that the trainer reaches")
            judged = resume_canary(run_dir / "checkpoints", models.parts, group, store)
            progress = judged.progress
        elif start is not None:
            progress = start.load(models.parts, group)
        else:
            progress = resume(
                run_dir / "checkpoints", models.parts, group, store, publishes=publisher is not None
            )
        records = None
        if group.is_first:
            drop_steps_after(run_dir, progress.step)
        if config.record_tokens != "none":
            records = RecordWriter(run_dir, rank=group.rank, keep=config.record_tokens, prunes=group.is_first)
            at_the_end.callback(records.close)
        controller = None
        if publisher is not None and (judged is None or judged.is_new):
            publisher.publish(version=progress.version, step=progress.step)
        if canary is not None and judged is not None and isinstance(publisher, Publisher):
            controller = Canary(
                canary, group, store, publisher, checkpoints, run_dir / "checkpoints", models.parts, stop,
                stable_step=judged.stable_step, candidate=judged.candidate,
                is_comparing=judged.candidate is not None, is_saved=judged.is_saved,
            )  # fmt: skip
            if not judged.is_new:
                controller.serve_again()
        source: BatchSource | None = None
        longest = None
        if isinstance(models.teacher, EngineTeacher):
            longest = models.teacher.meet(stopping=stop.is_set)
        limits = _limits(options, models.policy, teacher_tokens=longest)
        if stored is not None:
            source = RerunBatches(stored, algorithm, limits, stop)
        elif recorded is not None:
            source = Recorded(recorded, algorithm, groups=groups, limits=limits, stop=stop)
        elif store is not None:
            source = RolledOut(
                store, algorithm, groups=groups, max_staleness=max_staleness, on_stale=on_stale, lag=lag,
                swap_between_batches=swap_between_batches, data_ended=data_ended, limits=limits,
                timeout_s=math.inf if of_traffic else config.batch_timeout_s, stop=stop,
                of_traffic=of_traffic,
            )  # fmt: skip
        metrics = None
        if group.is_first:
            metrics = _metrics(config, algorithm, run_dir, after_step=progress.step)
            at_the_end.callback(metrics.close)
        loop = TrainingLoop(
            config, algorithm, group, models, options,
            source=source, publisher=publisher, released=tuple(released),
            parking=models.parking(group.device) if parks else None, checkpoints=checkpoints, best=best,
            metrics=metrics, records=records, stop=stop, seed=seed, progress=progress,
            until=config.steps if start is None else start.until,
            spans=spans if group.is_first else None, canary=controller,
        )  # fmt: skip
        finished = loop.run()
        if publisher is not None:
            publisher.finish()
        if finished:
            write_final(models.policy, run_dir, like=model_path, writes=group.is_first)
        return RunResult(loop.progress.step, loop.progress.version, finished)


def _facts(config: TrainerConfig, algorithm: AlgorithmConfig, seed: int) -> dict[str, str]:
    """Return the settings that must be the same on all ranks, by key.

    Only the first rank calls the teacher's engine. Another node may know it under another URL, and a URL
    with a password must not be logged.
    """
    own = {"start", "nodes", "node_rank", "master", "teacher_url"}
    trainer = config.model_dump(mode="json", exclude=own)
    settings = {"trainer": trainer, "algorithm": algorithm.model_dump(mode="json")}
    flat = {f"{part}.{key}": value for part, keys in settings.items() for key, value in keys.items()}
    return {key: json.dumps(value) for key, value in {**flat, "seed": seed}.items()}


def _checkpoints(
    config: TrainerConfig,
    ranks: Ranks,
    run_dir: Path,
    model_path: Path,
    best: BestMetric,
    store: Store | None,
) -> Checkpoints:
    return Checkpoints(
        run_dir / "checkpoints",
        ranks,
        facts=facts_of(config, model_path),
        keep=config.keep_checkpoints,
        keep_best=config.keep_best,
        score=best.score,
        written=lambda step: store.commit_checkpoint(step) if store else None,
        wait=not config.async_checkpoints,
    )


def _limits(options: StepOptions, policy: Policy, *, teacher_tokens: int | None) -> SampleLimits:
    experts = expert_layout(policy.model.config.to_dict())
    return SampleLimits(options.microbatch_tokens, policy.shape.vocab, experts, teacher_tokens)


def _metrics(
    config: TrainerConfig, algorithm: AlgorithmConfig, run_dir: Path, *, after_step: int
) -> MetricsWriter:
    settings = {
        "trainer": config.model_dump(mode="json", exclude={"teacher_url"}),
        "algorithm": algorithm.model_dump(mode="json"),
    }
    return MetricsWriter(run_dir, after_step=after_step, trackers=config.trackers, config=settings)
