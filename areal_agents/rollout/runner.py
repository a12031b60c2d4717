"""The rollout process: evaluates, collects training groups and evaluates meanwhile, and evaluates again.

The next action follows from the store alone, so a runner that was killed continues when it is restarted. It
writes only over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import FINGERPRINT, OPENED_BY_RUNNER, Split, Task
from areal_agents.errors import DataError, RequestError, TrainingError
from areal_agents.rollout.agents.agent import Agent, load_agent
from areal_agents.rollout.agents.attempt import FailureStreak
from areal_agents.rollout.config import AgentSpec, DataConfig, EvalConfig, RewardConfig, RolloutConfig
from areal_agents.rollout.data import TaskMixture, TaskSource, load_tasks
from areal_agents.rollout.evaluation import abort_open, evaluate_tasks
from areal_agents.rollout.groups.collector import Collector
from areal_agents.rollout.rewarding import RewardFunction
from areal_agents.rollout.samplers import sampler_of
from areal_agents.rollout.watch import StoreWatch
from areal_agents.rollout.worker_share import WorkerShare
from areal_agents.sandbox.remote.hosts import SandboxHosts
from areal_agents.store import Store, VersionRow

logger = logging.getLogger(__name__)

FIRST_VERSION_TIMEOUT_S = 900.0
PROXY_TIMEOUT_S = 120.0
PROXY_PATIENCE_S = 60.0  # in which a proxy is started again, or another one takes its episodes over
SWAP_TIMEOUT_S = 300.0
SWAP_POLL_S = 0.1
ABORT_TIMEOUT_S = 10.0


async def run(
    *,
    store: Store,
    proxy_url: str,
    admin_key: str | None,
    agent: AgentSpec,
    data: DataConfig,
    rollout: RolloutConfig,
    evaluation: EvalConfig | None,
    steps: int,
    seed: int = 0,
    first_version: int = 0,
    shortage: Callable[[], str | None] = lambda: None,
    reward: RewardConfig | None = None,
    logs: Path | None = None,
    stop: asyncio.Event | None = None,
    fingerprint: str = "",
    training_fingerprint: str = "",
    worker: WorkerShare | None = None,
    agents_url: str | None = None,
    hosts: SandboxHosts | None = None,
    job_owner: str = "",
) -> None:
    """Collect training groups until the version of step `steps` is published; evaluate around it.

    Evaluations are labelled "before" (at step 0, before any training episode), "step-<n>" (during
    training, for each passed multiple of `evaluation.every`) and "after" (training episodes aborted). A
    resumed run whose evaluations all have another fingerprint begins with one, labelled "step-<n>".

    Args:
        store: the store of the run, which is only read.
        proxy_url: the URL of the proxy, without a path.
        agent: see `load_agent`.
        seed: the seed of sampling, and of the data's order if the data has none.
        first_version: the version that the trainer starts with; earlier versions are from before a resume,
            and a server that was not restarted may still serve them.
        shortage: returns what the run is short of, for example disk space, or None; no group is submitted
            during a shortage.
        reward: names the reward function; None: the agent gives its rewards.
        logs: a folder for the output of an agent that is a command.
        stop: an event that ends the run early; agents are ended and open episodes aborted.
        fingerprint: a name of what episodes are played with; evaluations are recorded under it.
        training_fingerprint: the same for training episodes; see `Collector`.
        worker: this process's part, if several processes play the episodes of the run. They share the groups,
            the evaluations, `rollout.concurrency` and `evaluation.concurrency`; failures in a row count for
            each process by itself. Every process returns when the run has ended.
        agents_url: the URL at which agents reach the proxy; None: the one that the proxy gives.
        hosts: where the sandboxes of the agent are; None: on this machine.
        job_owner: a name of this process's place in the run, for an agent whose episodes are jobs: jobs that
            an earlier process of this place has left are cancelled. "": there is none.

    Raises:
        AgentError: the agent cannot be loaded, or too many attempts in a row failed.
        DataError: the tasks cannot be loaded, or are too few.
        RewardError: the reward function cannot be loaded.
        RequestError: the proxy cannot be reached.
        TrainingError: no version was published in time.
    """
    source = load_tasks(data, seed=seed)
    _check_enough(source, groups=rollout.groups, steps=steps)
    tasks = held_out_tasks(evaluation) if evaluation else []
    if worker is not None:
        assert rollout.concurrency, "RolloutConfig.for_engines chooses an automatic concurrency"
        rollout = rollout.model_copy(update={"concurrency": worker.part_of(rollout.concurrency)})
        if evaluation is not None:
            part = worker.part_of(evaluation.concurrency)
            evaluation = evaluation.model_copy(update={"concurrency": part})
    async with _runner(
        store,
        proxy_url,
        admin_key,
        agent,
        rollout,
        evaluation,
        seed,
        logs,
        reward,
        fingerprint,
        worker,
        agents_url,
        hosts,
        job_owner,
    ) as runner:
        running = runner.run(
            source,
            tasks,
            steps=steps,
            first_version=first_version,
            shortage=shortage,
            fingerprint=training_fingerprint,
        )
        await unless_stopped(running, stop)


async def evaluate(
    *,
    store: Store,
    proxy_url: str,
    admin_key: str | None,
    agent: AgentSpec,
    rollout: RolloutConfig,
    evaluation: EvalConfig,
    label: str,
    seed: int = 0,
    reward: RewardConfig | None = None,
    logs: Path | None = None,
    stop: asyncio.Event | None = None,
    tasks: Sequence[Task] | None = None,
    fingerprint: str = "",
    split: Split = "eval",
    job_owner: str = "",
) -> None:
    """Evaluate the weights that are served now. Arguments and errors are those of `run`.

    Args:
        tasks: the held-out tasks, if they are loaded already.
        split: of the episodes; "train" for tasks that are trained on.
    """
    tasks = held_out_tasks(evaluation) if tasks is None else tasks
    latest = store.latest_version()
    async with _runner(
        store,
        proxy_url,
        admin_key,
        agent,
        rollout,
        evaluation,
        seed,
        logs,
        reward,
        fingerprint,
        job_owner=job_owner,
    ) as runner:
        await unless_stopped(
            runner.evaluate(tasks, label, step=latest.step if latest else None, alone=True, split=split),
            stop,
        )


def end_of_data(data: DataConfig, store: Store, *, seed: int = 0) -> Callable[[], bool]:
    """Return a function that says whether every group of `data` was begun, before or after a resume.

    Data without `epochs` has no end, and is not loaded.

    Args:
        store: the store of the run, which is only read.
        seed: see `run`.

    Raises:
        DataError: the tasks cannot be loaded.
    """
    if any(source.epochs is None for source in (data.sources or [data])):
        return lambda: False
    source = load_tasks(data, seed=seed)
    return lambda: sampler_of(source, store.task_ids_started(), store.group_scores).next() is None


def held_out_tasks(evaluation: EvalConfig) -> list[Task]:
    """Return the tasks of an evaluation, which are the same each time."""
    return load_tasks(evaluation.data).epoch(0)[: evaluation.episodes]


@asynccontextmanager
async def _runner(
    store: Store,
    proxy_url: str,
    admin_key: str | None,
    agent: AgentSpec,
    rollout: RolloutConfig,
    evaluation: EvalConfig | None,
    seed: int,
    logs: Path | None,
    reward: RewardConfig | None,
    fingerprint: str,
    worker: WorkerShare | None = None,
    agents_url: str | None = None,
    hosts: SandboxHosts | None = None,
    job_owner: str = "",
) -> AsyncIterator[_RolloutRunner]:
    """Create a runner, and close its agents and connections at the end of the block."""
    assert rollout.concurrency, "RolloutConfig.for_engines chooses an automatic concurrency"
    function = RewardFunction(reward) if reward is not None else None
    # Two agents, so that evaluation has worker processes of its own.
    workers = min(rollout.workers, rollout.concurrency)
    owner = f"{job_owner}-train" if job_owner else ""
    trained = load_agent(agent, workers=workers, logs=logs, hosts=hosts, job_owner=owner)
    workers = min(rollout.workers, evaluation.concurrency if evaluation else 1)
    owner = f"{job_owner}-eval" if job_owner else ""
    evaluated = load_agent(agent, workers=workers, logs=logs, hosts=hosts, job_owner=owner)
    client = AsyncClient(proxy_url, admin_key, agents_url=agents_url, patience_s=PROXY_PATIENCE_S)
    try:
        yield _RolloutRunner(
            client, store, trained, evaluated, rollout, evaluation, seed, function, fingerprint, worker
        )
    finally:
        await asyncio.gather(trained.close(), evaluated.close())
        await client.close()


class _RolloutRunner:
    def __init__(
        self,
        client: AsyncClient,
        store: Store,
        trained: Agent,
        evaluated: Agent,
        rollout: RolloutConfig,
        evaluation: EvalConfig | None,
        seed: int,
        function: RewardFunction | None,
        fingerprint: str,
        worker: WorkerShare | None,
    ) -> None:
        self._worker = worker
        self._seed = seed
        self._fingerprint = fingerprint
        self._function = function
        self._client = client
        self._store = store
        self._trained = trained
        self._evaluated = evaluated
        self._rollout = rollout
        self._evaluation = evaluation
        self._patience = FailureStreak(rollout.give_up_after, least_s=rollout.give_up_s)

    async def run(
        self,
        source: TaskSource | TaskMixture,
        held_out: Sequence[Task],
        *,
        steps: int,
        first_version: int,
        shortage: Callable[[], str | None],
        fingerprint: str,
    ) -> None:
        await self._published(first_version)
        await self._reach_proxy()
        first = await self._served(FIRST_VERSION_TIMEOUT_S)
        await abort_open(self._client, self._store, worker=self._worker)
        try:
            if held_out and first.step == 0:
                await self.evaluate(held_out, "before", step=0, alone=True)
            elif held_out and first.step < steps and self._is_changed():
                await self.evaluate(held_out, f"step-{first.step}", step=first.step, alone=True)
            if first.step < steps:
                await self._train(source, held_out, steps=steps, shortage=shortage, fingerprint=fingerprint)
                reason = "every step of the run was trained"
                await abort_open(self._client, self._store, reason=reason, worker=self._worker)
            if held_out:
                last = await self._served(SWAP_TIMEOUT_S)
                await self.evaluate(held_out, "after", step=last.step, alone=True)
        except BaseException:
            await self._abort_at_the_end()
            raise

    async def evaluate(
        self,
        tasks: Sequence[Task],
        label: str,
        *,
        step: int | None,
        alone: bool = False,
        split: Split = "eval",
    ) -> None:
        """Evaluate the weights of `step`; `alone` if no training episodes run at the same time."""
        assert self._evaluation is not None
        beside = self._evaluation.concurrency
        logger.info("evaluation %s of %d tasks begins", label, len(tasks))
        await evaluate_tasks(
            self._client,
            self._store,
            self._evaluated,
            tasks,
            label=label,
            step=step,
            temperature=self._evaluation.temperature,
            seed=self._seed,
            concurrency=max(beside, self._rollout.concurrency) if alone else beside,
            limits=self._rollout.limits,
            retries=self._rollout.retries,
            patience=self._patience,
            attempts=self._evaluation.attempts,
            agent_error_reward=self._rollout.reward_of_agent_errors,
            function=self._function,
            fingerprint=self._fingerprint,
            split=split,
            worker=self._worker,
        )
        logger.info("evaluation %s has ended", label)

    def _is_changed(self) -> bool:
        """Whether every evaluation so far has another fingerprint, so that later ones have no base."""
        if not self._fingerprint:
            return False
        played = self._store.episodes(split="eval", metadata=OPENED_BY_RUNNER)
        found = {episode.metadata.get(FINGERPRINT) for episode in played if "eval" in episode.metadata}
        return bool(found) and not found & {None, self._fingerprint}

    async def _published(self, first_version: int) -> None:
        """Return when `first_version` or a later version is published."""
        watch = StoreWatch(self._store)
        changed = watch.listen()
        async with _running_beside(watch.run()):
            try:
                async with asyncio.timeout(FIRST_VERSION_TIMEOUT_S):
                    while self._store.max_version() < first_version:
                        changed.clear()
                        await changed.wait()
            except TimeoutError:
                raise TrainingError(
                    f"no policy version was published within {FIRST_VERSION_TIMEOUT_S:.0f} s; "
                    "see the trainer's log"
                ) from None

    async def _reach_proxy(self) -> None:
        """Return when the proxy can be reached; it may still be starting. RequestError if it never can."""
        deadline = asyncio.get_running_loop().time() + PROXY_TIMEOUT_S
        while True:
            try:
                await self._client.served_version()
                return
            except RequestError as error:
                if error.code != "unreachable":
                    return
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(SWAP_POLL_S)

    async def _served(self, timeout_s: float) -> VersionRow:
        """Return the latest version when the engine serves it; it is published before it is swapped in.

        Before the swap, a server that earlier runs have used may serve a higher version than the latest.
        """
        latest, served = self._latest(), -1
        try:
            async with asyncio.timeout(timeout_s):
                while (served := await self._served_version()) != latest.version:
                    await asyncio.sleep(SWAP_POLL_S)
                    latest = self._latest()
        except TimeoutError:
            raise TrainingError(
                f"version {latest.version} was published, but the engine serves {served} "
                f"after {timeout_s:.0f} s"
            ) from None
        return latest

    def _latest(self) -> VersionRow:
        latest = self._store.latest_version()
        assert latest is not None, "_published has waited for the first version"
        return latest

    async def _served_version(self) -> int:
        try:
            return await self._client.served_version()
        except RequestError as error:
            if error.status < 500:
                raise
            return -1  # the proxy or the engine may still be starting, or be in the middle of a swap

    async def _train(
        self,
        source: TaskSource | TaskMixture,
        held_out: Sequence[Task],
        *,
        steps: int,
        shortage: Callable[[], str | None],
        fingerprint: str,
    ) -> None:
        """Collect groups and evaluate side by side until the last step is published."""
        watch = StoreWatch(self._store)
        collector = Collector(
            client=self._client,
            store=self._store,
            agent=self._trained,
            source=source,
            config=self._rollout,
            steps=steps,
            seed=self._seed,
            shortage=shortage,
            changed=watch.listen(),
            patience=self._patience,
            function=self._function,
            fingerprint=fingerprint,
            worker=self._worker,
        )
        if self._worker is None or self._worker.index == 0:
            evaluating = self._evaluate_along(held_out, watch.listen(), steps=steps)
        else:
            evaluating = self._join_evaluations(held_out, watch.listen())
        async with (
            _running_beside(watch.run()),
            _running_beside(collector.run()),
            _running_beside(evaluating),
        ):
            await self._last_version(watch.listen(), steps=steps)

    async def _last_version(self, changed: asyncio.Event, *, steps: int) -> None:
        while True:
            changed.clear()
            version = self._store.latest_version()
            if version is not None and version.step >= steps:
                return
            await changed.wait()

    async def _evaluate_along(self, held_out: Sequence[Task], changed: asyncio.Event, *, steps: int) -> None:
        """Evaluate whenever the step has passed a further multiple of `every`."""
        every = self._evaluation.every if self._evaluation is not None else None
        if every is None or not held_out:
            return
        evaluated = 0
        while True:
            changed.clear()
            version = self._store.latest_version()
            if version is not None and version.step < steps and version.step // every > evaluated // every:
                evaluated = (await self._served(SWAP_TIMEOUT_S)).step
                if evaluated >= steps:
                    return  # the evaluation after training replaces this one
                await self.evaluate(held_out, f"step-{evaluated}", step=evaluated)
            await changed.wait()

    async def _join_evaluations(self, held_out: Sequence[Task], changed: asyncio.Event) -> None:
        """Take part in the evaluations beside training that the first process begins."""
        if not held_out:
            return
        metadata = dict(OPENED_BY_RUNNER)
        if self._fingerprint:
            metadata[FINGERPRINT] = self._fingerprint
        while True:
            changed.clear()
            running = self._store.episodes(split="eval", status="open", metadata=metadata)
            labels = {e.metadata["eval"]: e.metadata.get("step") for e in running if "eval" in e.metadata}
            for label, step in labels.items():
                await self.evaluate(held_out, label, step=step)
            await changed.wait()

    async def _abort_at_the_end(self) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await abort_open(self._client, self._store, worker=self._worker)
        except (
            TimeoutError,
            RequestError,
        ) as error:  # a restarted runner aborts them
            logger.warning("open episodes could not be aborted: %s", error)


@asynccontextmanager
async def _running_beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` concurrently with the block. An error of `work` ends the block and is raised; the end of the
    block cancels `work`.
    """
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        yield
        task.cancel()


async def unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event | None) -> None:
    """Run `work` until it ends or `stop` is set. Raises its first error, and logs the others of a group."""
    main = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait()) if stop is not None else None
    try:
        await asyncio.wait({main, *([stopping] if stopping else [])}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            logger.info("stopping")
    finally:
        for task in (main, stopping):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait({task})
    if main.cancelled():
        return
    error = main.exception()
    while isinstance(error, BaseExceptionGroup):
        for other in error.exceptions[1:]:
            logger.error("a further error of the rollouts", exc_info=other)
        error = error.exceptions[0]
    if error is not None:
        raise error


def _check_enough(tasks: TaskSource | TaskMixture, *, groups: int, steps: int) -> None:
    sources = tasks.sources if isinstance(tasks, TaskMixture) else (tasks,)
    passes = [(len(source.tasks), source.epochs) for source in sources]
    if sum(math.inf if epochs is None else count * epochs for count, epochs in passes) < groups * steps:
        together = " + ".join(f"{count} tasks × {epochs} epochs" for count, epochs in passes)
        raise DataError(
            f"{together} are fewer than the {groups * steps} groups "
            f"that {steps} steps of {groups} groups need; raise data.epochs or leave it out"
        )
