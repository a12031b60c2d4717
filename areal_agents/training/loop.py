"""The training loop: takes a batch, trains on it, publishes the next version, marks its groups as trained.

A step is one trained batch; a version is a number that is never reused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import TeacherError, TrainingError
from areal_agents.inference.engine import MemoryKind
from areal_agents.training.batches.leasing import Batch
from areal_agents.training.batches.source import BatchSource
from areal_agents.training.canary.controller import Canary
from areal_agents.training.checkpoint.best import BestMetric
from areal_agents.training.checkpoint.checkpoint import Checkpoints, TrainingProgress
from areal_agents.training.config import TrainerConfig
from areal_agents.training.control import RanksLost
from areal_agents.training.distributed import Ranks
from areal_agents.training.host_memory import Parking
from areal_agents.training.metrics.mfu import peak_flops
from areal_agents.training.metrics.step_metrics import (
    MetricsWriter,
    data_metrics,
    policy_metrics,
    queue_metrics,
    system_metrics,
)
from areal_agents.training.metrics.step_spans import export_step
from areal_agents.training.model.run_models import Models
from areal_agents.training.publish.publisher import Publisher
from areal_agents.training.publish.storage_publisher import StoragePublisher
from areal_agents.training.records.writer import RecordWriter
from areal_agents.training.step.recording import TrainedTokens
from areal_agents.training.step.step import StepOptions, StepResult, Stopped, train_batch

if TYPE_CHECKING:
    from areal_agents.telemetry.spans import Spans

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announced:
    """What every rank is told of the batch that the first rank has.

    Attributes:
        position: see `Batch.position`.
        has_samples: whether there are samples to train on.
    """

    position: int
    has_samples: bool


@dataclass(eq=False)
class TrainingLoop:
    """A training run on one rank: its components and its progress.

    Attributes:
        records: writes the tokens of each step; None if they are not recorded.
        source, metrics: exist on the first rank only.
        publisher: exists on every rank, or on none if there are no engines.
        released: the kinds of memory that the engines release while a step is trained.
        parking: moves the models to the GPU while the engines have released it; None if they stay where they
            are.
        progress: the last step, whose version is published.
        until: the last step to train; the learning rate's schedule follows `config.steps`.
        spans: exports the spans of steps, on the first rank; None: they are not exported.
        canary: publishes the weights of every few steps as a candidate, and then says from which weights
            training continues; None: the weights of each step are published to all engines.
        saved_step: the step of the newest checkpoint, or the initial step.
        last: metrics of the last step of this process run, on the first rank.
    """

    config: TrainerConfig
    algorithm: AlgorithmConfig
    ranks: Ranks
    models: Models
    options: StepOptions
    source: BatchSource | None
    publisher: Publisher | StoragePublisher | None
    released: tuple[MemoryKind, ...]
    parking: Parking | None
    checkpoints: Checkpoints
    best: BestMetric
    metrics: MetricsWriter | None
    records: RecordWriter | None
    stop: threading.Event
    seed: int
    progress: TrainingProgress
    until: int
    spans: Spans | None
    canary: Canary | None = None
    saved_step: int = field(init=False)
    last: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.saved_step = self.progress.step

    def run(self) -> bool:
        """Train until the last step is done; return False if a stop is requested before. Collective.

        In both cases, and if a batch or a teacher is not available, the last complete step is saved in a
        checkpoint.
        Raises the errors of `training.run`.
        """
        if self.canary is not None:
            self.canary.save_stable(self.progress)
        finished = self._decide()
        while finished and self.progress.step < self.until:
            finished = self._step() and self._decide()
        self._save()
        self.checkpoints.finish()
        if not finished:
            logger.info("stopped after step %d", self.progress.step)
        return finished

    def _decide(self) -> bool:
        """With a canary, do what is due for a candidate; return False if a stop is requested before."""
        if self.canary is None:
            return True
        progress = self.canary.decide(self.progress, is_last=self.progress.step >= self.until)
        if progress is not None:
            self.progress = progress
        return progress is not None

    def _step(self) -> bool:
        """Train one batch; return False if a stop is requested before it was trained."""
        began = time.monotonic()
        batch, announced = self._next_batch()
        if announced is None:
            return False
        try:
            self.last = self._train(batch, announced, began)
        except Stopped:
            return False
        except TeacherError as error:
            self._end_with(error)
        if self.metrics is not None:
            self.metrics.write({**self.last, "time": time.time()})
        if self.config.keep_best:
            self.ranks.from_first(lambda: self.best.check(self.last))
        self.checkpoints.check()
        if self.progress.step % self.config.checkpoint_every == 0:
            self._save()  # after the step's line in the metrics: a resume drops the lines of later steps
        return True

    def _next_batch(self) -> tuple[Batch | None, Announced | None]:
        """Return the batch, on the first rank, and what every rank is told of it; None if there is none
        because a stop is requested. If it cannot be had, all ranks save and raise the error."""
        batch = None

        def announce() -> Announced | None:
            nonlocal batch
            assert self.source is not None
            batch = self.source.next(self.progress)
            return None if batch is None else Announced(batch.position, bool(batch.samples))

        try:
            announced = self.ranks.from_first(announce)
        except RanksLost:
            raise
        except TrainingError as error:
            self._end_with(error)
        return batch, announced

    def _end_with(self, error: TrainingError) -> NoReturn:
        """Save a checkpoint, then raise the error that ends the run on every rank. Collective."""
        logger.error("the run ends after step %d: %s", self.progress.step, error)
        self._save()
        self.checkpoints.finish()
        raise error

    def _train(self, batch: Batch | None, announced: Announced, began: float) -> dict[str, Any]:
        """Train one step on a batch that was requested at `began`, and return its metrics on the first
        rank."""
        rate = self.models.set_rate(self.progress.step, self.config)
        started, started_cpu = time.monotonic(), time.process_time()
        result = self._optimize(batch, announced)
        train_s, train_cpu_s = time.monotonic() - started, time.process_time() - started_cpu
        self._record(batch, result)
        swap_wait_s = self._wait_for_swap()
        progress = TrainingProgress(self.progress.step + 1, self.progress.version + 1, announced.position)
        published = None
        published_s = None
        if self.publisher is not None and self.canary is None:
            publishing_s = time.time()
            published = self.publisher.publish(version=progress.version, step=progress.step)
            published_s = (publishing_s, time.time())
        self.progress = progress
        if batch is None:
            return {}
        assert self.source is not None
        self.source.mark_trained(batch, progress)
        wait_s = batch.wait_s + swap_wait_s
        values = {
            "step": progress.step,
            "version": progress.version,
            **data_metrics(batch.report, batch.staleness),
            **queue_metrics(batch),
            **policy_metrics(result),
            "lr": rate,
            **system_metrics(
                result,
                sampled_tokens=batch.report.sampled_tokens,
                step_s=time.monotonic() - began,
                wait_s=wait_s,
                train_s=train_s,
                train_cpu_s=train_cpu_s,
                published=published,
                devices=self.ranks.count,
                peak=peak_flops(self.ranks.device),
            ),
        }
        if self.spans is not None:
            now_s = time.time()
            began_s = now_s - (time.monotonic() - began)
            export_step(self.spans, values, began_s=began_s, ended_s=now_s, published_s=published_s)
        logger.info(
            "step %d: reward %.3f, %d tokens, waited %.1f s, trained %.1f s, paused %.2f s",
            progress.step, values["reward_mean"], values["tokens"], wait_s, train_s, values["pause_s"],
        )  # fmt: skip
        return values

    def _optimize(self, batch: Batch | None, announced: Announced) -> StepResult:
        """Train on the samples of a batch, if it has any. Raises Stopped as `train_batch` does."""
        if not announced.has_samples:
            return StepResult.nothing()
        with self._engines_asleep():
            return train_batch(
                self.models.policy,
                self.models.optimizer,
                None if batch is None else batch.data,
                self.algorithm,
                self.options,
                ranks=self.ranks,
                version=self.progress.version,
                seed=self.seed + self.progress.step + 1,
                critic=self.models.critic,
                reference=self.models.reference,
                teacher=self.models.teacher,
                stopping=self.stop.is_set,
            )

    def _record(self, batch: Batch | None, result: StepResult) -> None:
        """Start writing the tokens that this rank trained in the step after `progress`."""
        if self.records is None:
            return
        tokens = result.tokens if result.tokens is not None else TrainedTokens()
        step, version = self.progress.step + 1, self.progress.version
        data = None if batch is None else batch.data
        self.records.write(step, lambda: tokens.rows(step=step, version=version, data=data))

    @contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """Release the memory of engines on the same GPUs within the block, if the configuration says so."""
        if not isinstance(self.publisher, Publisher) or not self.released:
            yield
            return
        with self.publisher.engines_asleep(self.released, together=(Stopped, TeacherError)):
            try:
                if self.parking is not None:
                    self.parking.fetch()
                yield
            finally:
                if self.parking is not None:
                    self.parking.park()
                elif self.ranks.device.type == "cuda":
                    torch.cuda.empty_cache()  # free cached memory for the engines

    def _wait_for_swap(self) -> float:
        """Wait until the batch's weights may be swapped in; return how long that took, in seconds."""
        started = time.monotonic()
        if self.source is not None and self.progress.step + 1 < self.until:
            self.source.wait_for_swap()
        return time.monotonic() - started

    def _save(self) -> None:
        """Write a checkpoint of the last step; a canary writes those that a run can resume from by itself."""
        if self.canary is None and self.saved_step != self.progress.step:
            if self.records is not None:
                self.records.wait()  # every step that a checkpoint contains has its records
            score = self.last.get(self.best.name)
            self.checkpoints.save(self.models.parts, self.progress, score=score)
            self.saved_step = self.progress.step
