"""The loop: lease a batch, train on it, publish the next version, mark the groups as trained.

A step is a batch trained; a version is a number that is never used twice. A resumed run takes the
step from its checkpoint, gives back what later steps had leased, and publishes under a version
above every one there ever was.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.inference.engine import Engine
from areal_agents.store import Store
from areal_agents.training.batches import Batch, next_batch
from areal_agents.training.checkpoint import Progress, latest_checkpoint, load_checkpoint, save_checkpoint
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.distributed import ranks as join_ranks
from areal_agents.training.metrics import MetricsWriter, data_metrics, policy_metrics, queue_metrics
from areal_agents.training.model import Policy, load_policy
from areal_agents.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from areal_agents.training.publish import Published, Publisher, write_model
from areal_agents.training.step import StepOptions, StepResult, Stopped, train_batch

log = logging.getLogger(__name__)

_MICROBATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    Attributes:
        step: batches trained, those before a resume included; version: the last one published.
        finished: False if it was stopped before its last step.
    """

    step: int
    version: int
    finished: bool


def run(
    config: TrainerConfig,
    algorithm: AlgorithmConfig,
    *,
    store: Store | None,
    engine: Engine | None,
    model_path: str | Path,
    run_dir: str | Path,
    groups: int,
    max_staleness: int,
    stop: threading.Event,
    seed: int = 0,
) -> RunResult:
    """Train until `config.steps` batches are done, or `stop` is set. Resumes by itself.

    Under torchrun every rank calls this; only the first one's store and engine are used, the
    others pass None.

    Args:
        groups: groups per batch.
        max_staleness: η, the hard bound on the staleness of a trained token.
        stop: ends the run between micro-batches, with a checkpoint.

    Raises:
        TrainingError: the model or checkpoint cannot be used, groups did not come in time, or a
            sample does not fit a micro-batch.
        EngineError: the engine is lost or refused the weights.
        StoreError: the store is unusable.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(seed)
    with join_ranks(config.device) as group:
        link = None
        if group.is_first:
            if store is None or engine is None:
                raise ValueError("the first rank needs a store and an engine")
            link = _Link(
                store,
                Publisher(
                    store=store, engine=engine, run_dir=Path(run_dir), model_path=Path(model_path),
                    keep=config.keep_weights,
                ),
            )  # fmt: skip
        try:
            trainer = _Trainer(config, algorithm, group, link, Path(model_path), Path(run_dir), stop, seed)
            return trainer.run(groups=groups, max_staleness=max_staleness)
        finally:
            if link is not None:
                link.publisher.close()


@dataclass(frozen=True, slots=True)
class _Link:
    """What only the first rank has: the store, and the way to the engine."""

    store: Store
    publisher: Publisher


class _Trainer:
    """The state of a run on one rank: policy, optimizer, and how far it has come."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        ranks: Ranks,
        link: _Link | None,
        model_path: Path,
        run_dir: Path,
        stop: threading.Event,
        seed: int,
    ) -> None:
        self.config, self.algorithm, self.ranks, self.link = config, algorithm, ranks, link
        self.model_path, self.run_dir, self.stop, self.seed = model_path, run_dir, stop, seed
        self.options = StepOptions(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            weight_cap=algorithm.weight_cap,
            minibatches=algorithm.minibatches,
            microbatch_tokens=config.microbatch_tokens or _MICROBATCH_TOKENS[ranks.device.type],
            share_prefixes=config.share_prefixes,
            grad_clip=config.grad_clip,
        )
        self.policy: Policy = load_policy(model_path, ranks, dtype=_DTYPES[config.dtype])
        self.optimizer = make_optimizer(self.policy, config)
        self.progress = Progress(step=0, version=-1)
        self.saved_step = 0  # the step of the newest checkpoint; a run that starts needs none

    def run(self, *, groups: int, max_staleness: int) -> RunResult:
        """Begin or resume, and loop."""
        self._begin()
        metrics = MetricsWriter(self.run_dir, after_step=self.progress.step) if self.link else None
        try:
            while self.progress.step < self.config.steps:
                started = time.monotonic()
                batch = self._next_batch(groups, max_staleness)
                if batch is None:
                    return self._stopped()
                try:
                    values = self._train(batch)
                except Stopped as stopped:
                    return self._stopped(clean=stopped.clean)
                if metrics is not None:
                    metrics.write({**values, "step_s": time.monotonic() - started, "time": time.time()})
                if self.progress.step % self.config.checkpoint_every == 0:
                    self._checkpoint()  # after its line: a resume drops the lines of later steps
        finally:
            if metrics is not None:
                metrics.close()
        self._checkpoint()
        weights = self.policy.full_state_dict()
        if self.link:
            write_model(weights, self.run_dir / "final", like=self.model_path, dtype=self.policy.saved_dtype)
        return RunResult(self.progress.step, self.progress.version, finished=True)

    def _begin(self) -> None:
        """Load the latest checkpoint, if any, and publish its weights under an unused version."""
        path = self.ranks.broadcast(latest_checkpoint(self.run_dir / "checkpoints"))
        step, version = 0, 0
        if path is not None:
            step = load_checkpoint(path, self.policy, self.optimizer, self.ranks).step
            log.info("resuming after step %d from %s", step, path)
        if self.link:
            if path is not None:
                self.link.store.commit_checkpoint(step)  # it may have died between the folder and the row
            returned = self.link.store.return_leases(step)
            if returned:
                log.info("%d groups that later steps had taken are complete again", returned)
            version = self.link.store.max_version() + 1
        version = self.ranks.broadcast(version)
        self._publish(step=step, version=version)
        self.progress, self.saved_step = Progress(step, version), step

    def _next_batch(self, groups: int, max_staleness: int) -> Batch | None:
        batch = None
        if self.link:
            batch = next_batch(
                self.link.store,
                self.algorithm,
                groups=groups,
                step=self.progress.step + 1,
                version=self.progress.version,
                max_staleness=max_staleness,
                timeout_s=self.config.batch_timeout_s,
                stop=self.stop,
            )
        return self.ranks.broadcast(batch)

    def _train(self, batch: Batch) -> dict[str, object]:
        """One step; its metrics."""
        step, version = self.progress.step + 1, self.progress.version + 1
        rate = learning_rate(self.progress.step, self.config)
        set_learning_rate(self.optimizer, rate)
        started, started_cpu = time.monotonic(), time.process_time()
        result = StepResult.nothing()
        if batch.samples:
            result = train_batch(
                self.policy,
                self.optimizer,
                batch.samples,
                self.options,
                ranks=self.ranks,
                version=self.progress.version,
                seed=self.seed + step,
                stopping=self.stop.is_set,
            )
        train_s, train_cpu_s = time.monotonic() - started, time.process_time() - started_cpu
        published = self._publish(step=step, version=version)
        if self.link:
            self.link.store.mark_trained(batch.group_ids, step=step, version=version)
        self.progress = Progress(step, version)
        values = {
            "step": step,
            "version": version,
            **data_metrics(batch.report, batch.staleness),
            **queue_metrics(batch),
            **policy_metrics(result),
            "lr": rate,
            "train_s": train_s,
            "train_cpu_s": train_cpu_s,
            "publish_s": published.publish_s if published else 0.0,
            "pause_s": published.pause_s if published else 0.0,
        }
        log.info(
            "step %d: reward %.3f, %d tokens, waited %.1f s, trained %.1f s, paused %.2f s",
            step, values["reward_mean"], values["tokens"], batch.wait_s, train_s, values["pause_s"],
        )  # fmt: skip
        return values

    def _publish(self, *, step: int, version: int) -> Published | None:
        weights = self.policy.full_state_dict()
        if not self.link:
            return None
        return self.link.publisher.publish(weights, version=version, step=step, dtype=self.policy.saved_dtype)

    def _checkpoint(self) -> None:
        if self.saved_step == self.progress.step:
            return
        save_checkpoint(
            self.run_dir / "checkpoints",
            self.policy,
            self.optimizer,
            self.progress,
            self.ranks,
            keep=self.config.keep_checkpoints,
        )
        if self.link:
            self.link.store.commit_checkpoint(self.progress.step)
        self.saved_step = self.progress.step

    def _stopped(self, *, clean: bool = True) -> RunResult:
        """End early. Weights between two steps of one batch are not worth a checkpoint."""
        if clean:
            self._checkpoint()
        log.info("stopped after step %d", self.progress.step)
        return RunResult(self.progress.step, self.progress.version, finished=False)
