"""The loop: take a batch, train on it, publish the next version, mark the groups as trained.

A step is a batch trained; a version is a number that is never used twice. A resumed run takes the
step from its checkpoint, gives back what later steps had leased, and publishes under a version
above every one there ever was.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.core.rollout import OnStale
from areal_agents.errors import TrainingError
from areal_agents.inference.engine import Engine, MemoryKind
from areal_agents.inference.routing import expert_layout
from areal_agents.store import Store
from areal_agents.training.batches import Batch, next_batch, wait_until_whole
from areal_agents.training.checkpoint import Checkpoints, Progress, latest_checkpoint, load_checkpoint
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.distributed import ranks as join_ranks
from areal_agents.training.export import facts_of
from areal_agents.training.heldout import heldout_reward
from areal_agents.training.metrics import (
    MetricsWriter,
    data_metrics,
    policy_metrics,
    queue_metrics,
    system_metrics,
)
from areal_agents.training.mfu import peak_flops
from areal_agents.training.model_folder import remove_unfinished
from areal_agents.training.models import Models, load_models
from areal_agents.training.publishing.folders import write_policy, write_policy_adapter
from areal_agents.training.publishing.publisher import Published, Publisher
from areal_agents.training.recorded import RecordedGroups, next_recorded_batch
from areal_agents.training.step import StepOptions, StepResult, Stopped, train_batch
from areal_agents.training.vetting import Limits

log = logging.getLogger(__name__)

_MICROBATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
HELDOUT = "heldout"
_ENDING_TRAINER_S = 60.0  # that the trainer of an earlier life may take to end


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
    engines: Sequence[Engine],
    model_path: str | Path,
    run_dir: str | Path,
    groups: int,
    max_staleness: int | None,
    stop: threading.Event,
    on_stale: OnStale = "mask",
    swap_between_batches: bool = False,
    released: Sequence[MemoryKind] = (),
    seed: int = 0,
    recorded: RecordedGroups | None = None,
    evaluates: bool = False,
) -> RunResult:
    """Train until `config.steps` batches are done, or `stop` is set. Resumes by itself.

    Under torchrun every rank calls this; only the first one's store, engines and recorded groups are
    used, the others pass none.

    Args:
        store: of the run.
        engines: the replicas that versions are published to; none where `recorded` groups are trained on,
            and then weights go to checkpoints and to `final` only.
        groups: groups per batch.
        max_staleness: η, the hard bound on the staleness of a trained token; None: no bound. Of recorded
            groups any token is trained, its weight π_prox/μ corrects for who sampled it.
        stop: ends the run between micro-batches, with a checkpoint unless the batch has had an optimizer
            step already.
        on_stale: what becomes of tokens beyond the bound, see `algorithms.staleness`.
        swap_between_batches: publish a version only when the batch that is being generated is whole.
        released: what of their memory the engines give back while a step is trained.
        recorded: groups of another store, trained on in place of those that `store` gets.
        evaluates: whether held-out evaluations reach the store while this trains.

    Raises:
        TrainingError: the model or checkpoint cannot be used, groups did not come in time, or too many
            of them cannot be trained on.
        EngineError: no engine takes the weights, or one serves others than were published.
        StoreError: the store is unusable.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(seed)
    with join_ranks(config.device, replicas=config.replicas, context=config.context_parallel) as group:
        link = None
        if group.is_first:
            if store is None or bool(engines) == (recorded is not None):
                raise ValueError("the first rank needs a store, and engines or recorded groups")
            store.become_trainer(_ENDING_TRAINER_S)  # before a file of an earlier trainer is touched
            link = _Link(store, tuple(engines), recorded)
        trainer = _Trainer(
            config, algorithm, group, link, Path(model_path), Path(run_dir), stop, seed, evaluates,
            _Pace(groups, max_staleness, on_stale, swap_between_batches, tuple(released)),
        )  # fmt: skip
        try:
            return trainer.run()
        finally:
            trainer.close()


@dataclass(frozen=True, slots=True)
class _Pace:
    """How rollout and training keep step; the names are those of `run`."""

    groups: int
    max_staleness: int | None
    on_stale: OnStale
    swap_between_batches: bool
    released: tuple[MemoryKind, ...]


@dataclass(frozen=True, slots=True)
class _Link:
    """What only the first rank has: the store, and either engines or recorded groups."""

    store: Store
    engines: tuple[Engine, ...]
    recorded: RecordedGroups | None


class _Trainer:
    """The state of a run on one rank: models, optimizers, and how far it has come."""

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
        evaluates: bool,
        pace: _Pace,
    ) -> None:
        self.config, self.algorithm, self.ranks, self.link = config, algorithm, ranks, link
        self.model_path, self.run_dir, self.stop, self.seed = model_path, run_dir, stop, seed
        self.pace = pace
        self.options = StepOptions(
            microbatch_tokens=config.microbatch_tokens or _MICROBATCH_TOKENS[ranks.device.type],
            share_prefixes=config.share_prefixes,
            grad_clip=config.grad_clip,
            downweight_stale=pace.on_stale == "downweight",
        )
        self.models: Models = load_models(config, algorithm, model_path, ranks)
        policy = self.models.policy
        self.limits = Limits(
            self.options.microbatch_tokens, policy.shape.vocab, expert_layout(policy.model.config.to_dict())
        )
        self.best = config.best_metric or (HELDOUT if evaluates else "reward_mean")
        self.checkpoints = Checkpoints(
            run_dir / "checkpoints",
            ranks,
            facts=facts_of(config, model_path),
            keep=config.keep_checkpoints,
            keep_best=config.keep_best,
            score=self._score,
            written=lambda step: link.store.commit_checkpoint(step) if link else None,
            wait=not config.async_checkpoints,
        )
        self.publisher = None
        if ranks.broadcast(link is not None and bool(link.engines)):
            self.publisher = Publisher(
                config.publish, self.models.policy, ranks,
                store=link.store if link else None, engines=link.engines if link else (),
                run_dir=run_dir, model_path=model_path, keep=config.keep_weights,
            )  # fmt: skip
        self.progress = Progress(step=0, version=-1)
        self.saved_step = 0  # the step of the newest checkpoint; a run that starts needs none
        self.last: dict[str, Any] = {}  # metrics of the last step of this life

    def run(self) -> RunResult:
        """Begin or resume, and loop."""
        self._begin()
        metrics = self._metrics_writer()
        try:
            while self.progress.step < self.config.steps:
                started = time.monotonic()
                batch = self._next_batch()
                if batch is None:
                    return self._stopped()
                try:
                    self.last = self._train(batch, started)
                except Stopped:
                    return self._stopped()
                if metrics is not None:
                    metrics.write({**self.last, "time": time.time()})
                self._check_best()
                self.checkpoints.check()
                if self.progress.step % self.config.checkpoint_every == 0:
                    self._checkpoint()  # after its line: a resume drops the lines of later steps
            self._checkpoint()
            self.checkpoints.finish()
        finally:
            if metrics is not None:
                metrics.close()
        self._write_final()
        return RunResult(self.progress.step, self.progress.version, finished=True)

    def _metrics_writer(self) -> MetricsWriter | None:
        if self.link is None:
            return None
        settings = {
            "trainer": self.config.model_dump(mode="json"),
            "algorithm": self.algorithm.model_dump(mode="json"),
        }
        after = self.progress.step
        return MetricsWriter(self.run_dir, after_step=after, trackers=self.config.trackers, config=settings)

    def _begin(self) -> None:
        """Load the latest checkpoint, if any, and publish its weights under an unused version."""
        path = self.ranks.broadcast(latest_checkpoint(self.run_dir / "checkpoints"))
        progress = Progress(0, 0)
        if path is not None:
            progress = load_checkpoint(path, self.models.parts, self.ranks)
            log.info("resuming after step %d from %s", progress.step, path)
        step, version = progress.step, progress.version
        if self.link:
            if path is not None:
                self.link.store.commit_checkpoint(step)  # it may have died between the folder and the row
            returned = self.link.store.return_leases(step)
            if returned:
                log.info("%d groups that later steps had taken are complete again", returned)
            if self.publisher is not None:
                # Above the checkpoint's too, in case the store is another: 0 is what engines start with.
                trained = version if path is not None else -1
                version = max(self.link.store.max_version(), trained) + 1
        version = self.ranks.broadcast(version)
        self._publish(step=step, version=version)
        self.progress, self.saved_step = Progress(step, version, progress.position), step

    def _next_batch(self) -> Batch | None:
        batch, pace = None, self.pace
        step = self.progress.step + 1
        if self.link and self.link.recorded:
            batch = next_recorded_batch(
                self.link.recorded, self.algorithm, groups=pace.groups, step=step,
                position=self.progress.position, limits=self.limits, stop=self.stop,
            )  # fmt: skip
        elif self.link:
            batch = next_batch(
                self.link.store,
                self.algorithm,
                groups=pace.groups,
                step=step,
                version=self.progress.version,
                max_staleness=pace.max_staleness,
                on_stale=pace.on_stale,
                limits=self.limits,
                timeout_s=self.config.batch_timeout_s,
                stop=self.stop,
            )
        return self.ranks.broadcast(batch)

    def _train(self, batch: Batch, began: float) -> dict[str, Any]:
        """One step, of a batch that was asked for at `began`; its metrics."""
        step, version = self.progress.step + 1, self.progress.version + 1
        rate = self.models.set_rate(self.progress.step, self.config)
        started, started_cpu = time.monotonic(), time.process_time()
        result = StepResult.nothing()
        if batch.samples:
            with self._engines_asleep():
                result = train_batch(
                    self.models.policy,
                    self.models.optimizer,
                    batch.data,
                    self.algorithm,
                    self.options,
                    ranks=self.ranks,
                    version=self.progress.version,
                    seed=self.seed + step,
                    critic=self.models.critic,
                    reference=self.models.reference,
                    stopping=self.stop.is_set,
                )
        train_s, train_cpu_s = time.monotonic() - started, time.process_time() - started_cpu
        batch = self._wait_for_the_batch_beside(batch, step)
        published = self._publish(step=step, version=version)
        if self.link and self.publisher is not None:
            self.link.store.mark_trained(batch.group_ids, step=step, version=version)
        self.progress = Progress(step, version, batch.position)
        values = {
            "step": step,
            "version": version,
            **data_metrics(batch.report, batch.staleness),
            **queue_metrics(batch),
            **policy_metrics(result),
            "lr": rate,
            **system_metrics(
                result,
                sampled_tokens=batch.report.sampled_tokens,
                step_s=time.monotonic() - began,
                wait_s=batch.wait_s,
                train_s=train_s,
                train_cpu_s=train_cpu_s,
                published=published,
                devices=self.ranks.count,
                peak=peak_flops(self.ranks.device),
            ),
        }
        log.info(
            "step %d: reward %.3f, %d tokens, waited %.1f s, trained %.1f s, paused %.2f s",
            step, values["reward_mean"], values["tokens"], batch.wait_s, train_s, values["pause_s"],
        )  # fmt: skip
        return values

    def _wait_for_the_batch_beside(self, batch: Batch, step: int) -> Batch:
        """With swaps between batches only: wait until no training episode is being generated.

        The batch with that time added to what the trainer waited for groups.
        """
        pace, started = self.pace, time.monotonic()
        if (
            self.link
            and self.publisher is not None
            and pace.swap_between_batches
            and step < self.config.steps
        ):
            timeout_s = self.config.batch_timeout_s
            wait_until_whole(self.link.store, groups=pace.groups, timeout_s=timeout_s, stop=self.stop)
        return replace(batch, wait_s=batch.wait_s + time.monotonic() - started)

    def _publish(self, *, step: int, version: int) -> Published | None:
        return self.publisher.publish(version=version, step=step) if self.publisher is not None else None

    def close(self) -> None:
        """End what runs beside the loop."""
        self.checkpoints.close()
        if self.publisher is not None:
            self.publisher.close()

    @contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """Engines on the same GPUs give their memory back meanwhile, where the run asks for that."""
        if self.publisher is None or not self.pace.released:
            yield
            return
        with self.publisher.engines_asleep(self.pace.released):
            yield
            if self.ranks.device.type == "cuda":
                torch.cuda.empty_cache()  # the engines take theirs next

    def _score(self, step: int, facts: Mapping[str, Any]) -> float | None:
        """By what a checkpoint is among the best."""
        if self.best == HELDOUT and self.link is not None:
            return heldout_reward(self.link.store, step)
        score = facts["score"]
        return score if isinstance(score, int | float) and math.isfinite(score) else None

    def _check_best(self) -> None:
        if self.config.keep_best and self.best != HELDOUT and self.best not in self.last:
            raise TrainingError(
                f"trainer.best_metric: there is no metric {self.best!r}; choose heldout or one of "
                f"{', '.join(sorted(self.last))}"
            )

    def _checkpoint(self) -> None:
        if self.saved_step != self.progress.step:
            self.checkpoints.save(self.models.parts, self.progress, score=self.last.get(self.best))
            self.saved_step = self.progress.step

    def _stopped(self) -> RunResult:
        """End early, with a checkpoint of the last whole step."""
        self._checkpoint()
        self.checkpoints.finish()
        log.info("stopped after step %d", self.progress.step)
        return RunResult(self.progress.step, self.progress.version, finished=False)

    def _write_final(self) -> None:
        """The trained model as a Hugging Face folder, and beside it the adapter where there is one."""
        policy, first = self.models.policy, self.ranks.is_first
        if first:
            remove_unfinished(self.run_dir, "final*")  # and of the adapter
        write_policy(policy, self.run_dir / "final", like=self.model_path, writes=first)
        if policy.lora is not None:
            write_policy_adapter(policy, self.run_dir / "final-adapter", base=self.model_path, writes=first)
