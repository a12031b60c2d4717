"""The rollout process: evaluates, collects training groups with evaluations in between, and evaluates again.

What to do next follows from the store alone, so a runner that was killed continues when it is started
again. It writes nothing but over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import Task
from areal_agents.errors import DataError, RequestError, TrainingError
from areal_agents.rollout.agents.agent import Agent, load_agent
from areal_agents.rollout.agents.attempt import FailureStreak
from areal_agents.rollout.config import DataConfig, EvalConfig, RolloutConfig
from areal_agents.rollout.data import TaskSource, load_tasks
from areal_agents.rollout.evaluation import abort_open, evaluate_tasks
from areal_agents.rollout.groups.collector import Collector
from areal_agents.rollout.watch import StoreWatch
from areal_agents.store import Store, VersionRow

logger = logging.getLogger(__name__)

FIRST_VERSION_TIMEOUT_S = 900.0
PROXY_TIMEOUT_S = 120.0
SWAP_TIMEOUT_S = 300.0
SWAP_POLL_S = 0.1
ABORT_TIMEOUT_S = 10.0


async def run(
    *,
    store: Store,
    proxy_url: str,
    admin_key: str | None,
    agent: str | Mapping[str, str],
    data: DataConfig,
    rollout: RolloutConfig,
    evaluation: EvalConfig | None,
    steps: int,
    seed: int = 0,
    first_version: int = 0,
    lack: Callable[[], str | None] = lambda: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Collect training groups until the version of step `steps` is published; evaluate around it.

    Evaluations are labelled "before" (on step 0, before any training episode), "step-<n>" (beside
    training, for each passed multiple of `evaluation.every`) and "after" (training episodes aborted).

    Args:
        store: read only.
        proxy_url: without a path.
        agent: see `load_agent`.
        seed: of what is sampled, and of the data's order where the data has none.
        first_version: the one that the trainer begins with; earlier ones are of an earlier process run of the
            run, and a server that outlived it may still serve them.
        lack: what the run lacks to take more on, for example room on a disk; no group is submitted while
            it lacks anything.
        stop: ends the run early; agents are ended and open episodes aborted.

    Raises:
        AgentError: the agent does not load, or nothing but failures in a row.
        DataError: the tasks do not load, or do not suffice.
        RequestError: the proxy is gone.
        TrainingError: no version was published in time.
    """
    source = load_tasks(data, seed=seed)
    _check_enough(source, groups=rollout.groups, steps=steps)
    tasks = held_out_tasks(evaluation) if evaluation else []
    async with _runner(store, proxy_url, admin_key, agent, rollout, evaluation, seed) as runner:
        await _unless_stopped(
            runner.run(source, tasks, steps=steps, first_version=first_version, lack=lack), stop
        )


async def evaluate(
    *,
    store: Store,
    proxy_url: str,
    admin_key: str | None,
    agent: str | Mapping[str, str],
    rollout: RolloutConfig,
    evaluation: EvalConfig,
    label: str,
    seed: int = 0,
    stop: asyncio.Event | None = None,
) -> None:
    """One evaluation of whatever is served now. Arguments and errors as for `run`."""
    tasks = held_out_tasks(evaluation)
    latest = store.latest_version()
    async with _runner(store, proxy_url, admin_key, agent, rollout, evaluation, seed) as runner:
        await _unless_stopped(
            runner.evaluate(tasks, label, step=latest.step if latest else None, alone=True), stop
        )


def end_of_data(data: DataConfig, store: Store, *, seed: int = 0) -> Callable[[], bool]:
    """Returns a function that tells whether all groups of `data` were begun, now or before a restart.

    Data without `epochs` has no end, and is not loaded.

    Args:
        store: read only.
        seed: as for `run`.

    Raises:
        DataError: the tasks do not load.
    """
    if data.epochs is None:
        return lambda: False
    source = load_tasks(data, seed=seed)
    return lambda: next(source.stream(set(store.task_ids_started())), None) is None


def held_out_tasks(evaluation: EvalConfig) -> list[Task]:
    """The tasks of an evaluation: the same ones each time."""
    return load_tasks(evaluation.data).epoch(0)[: evaluation.episodes]


@asynccontextmanager
async def _runner(
    store: Store,
    proxy_url: str,
    admin_key: str | None,
    agent: str | Mapping[str, str],
    rollout: RolloutConfig,
    evaluation: EvalConfig | None,
    seed: int,
) -> AsyncIterator[_Runner]:
    """A runner whose agents and connections are closed at the end, whatever happens."""
    # Two, so that evaluation has worker processes of its own.
    trained = load_agent(agent, workers=min(rollout.workers, rollout.concurrency))
    evaluated = load_agent(agent, workers=min(rollout.workers, evaluation.concurrency if evaluation else 1))
    client = AsyncClient(proxy_url, admin_key)
    try:
        yield _Runner(client, store, trained, evaluated, rollout, evaluation, seed)
    finally:
        await trained.close()
        await evaluated.close()
        await client.close()


class _Runner:
    def __init__(
        self,
        client: AsyncClient,
        store: Store,
        trained: Agent,
        evaluated: Agent,
        rollout: RolloutConfig,
        evaluation: EvalConfig | None,
        seed: int,
    ) -> None:
        self._seed = seed
        self._client = client
        self._store = store
        self._trained = trained
        self._evaluated = evaluated
        self._rollout = rollout
        self._evaluation = evaluation
        self._patience = FailureStreak(rollout.give_up_after, least_s=rollout.give_up_s)

    async def run(
        self,
        source: TaskSource,
        held_out: Sequence[Task],
        *,
        steps: int,
        first_version: int,
        lack: Callable[[], str | None],
    ) -> None:
        await self._published(first_version)
        await self._reach_proxy()
        first = await self._served(FIRST_VERSION_TIMEOUT_S)
        await abort_open(self._client, self._store)
        try:
            if held_out and first.step == 0:
                await self.evaluate(held_out, "before", step=0, alone=True)
            if first.step < steps:
                await self._train(source, held_out, steps=steps, lack=lack)
                await abort_open(self._client, self._store)
            if held_out:
                last = await self._served(SWAP_TIMEOUT_S)
                await self.evaluate(held_out, "after", step=last.step, alone=True)
        except BaseException:
            await self._abort_at_the_end()
            raise

    async def evaluate(
        self, tasks: Sequence[Task], label: str, *, step: int | None, alone: bool = False
    ) -> None:
        """One evaluation of the weights of `step`; `alone` when no training episodes run beside it."""
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
        )
        logger.info("evaluation %s has ended", label)

    async def _published(self, first_version: int) -> None:
        """Return once `first_version` or a later one is published."""
        watch = StoreWatch(self._store)
        changed = watch.listen()
        async with _cancelled_at_the_end(watch.run()):
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
        """Return once the proxy can be reached: it may still be starting. RequestError if it never can."""
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
        """The latest version, once the engine serves it: it is published before it is swapped in.

        A server that earlier runs have used may serve a higher version than the latest before the swap.
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
        assert latest is not None, "the first version is there before"
        return latest

    async def _served_version(self) -> int:
        try:
            return await self._client.served_version()
        except RequestError as error:
            if error.status < 500:
                raise
            return -1  # proxy and engine may still be starting, or in the middle of a swap

    async def _train(
        self,
        source: TaskSource,
        held_out: Sequence[Task],
        *,
        steps: int,
        lack: Callable[[], str | None],
    ) -> None:
        """Collect and evaluate side by side until the last step is published."""
        watch = StoreWatch(self._store)
        collector = Collector(
            client=self._client,
            store=self._store,
            agent=self._trained,
            source=source,
            config=self._rollout,
            steps=steps,
            seed=self._seed,
            lack=lack,
            changed=watch.listen(),
            patience=self._patience,
        )
        evaluating = self._evaluate_along(held_out, watch.listen(), steps=steps)
        async with (
            _cancelled_at_the_end(watch.run()),
            _cancelled_at_the_end(collector.run()),
            _cancelled_at_the_end(evaluating),
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
        """Evaluate whenever the step has passed another multiple of `every`."""
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
                    return  # the evaluation after training is this one
                await self.evaluate(held_out, f"step-{evaluated}", step=evaluated)
            await changed.wait()

    async def _abort_at_the_end(self) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await abort_open(self._client, self._store)
        except (TimeoutError, RequestError) as error:  # the proxy may be gone; the next process aborts
            logger.warning("open episodes could not be aborted: %s", error)


@asynccontextmanager
async def _cancelled_at_the_end(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the block. Its error ends the block and is raised; the block's end cancels it."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        yield
        task.cancel()


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event | None) -> None:
    """Run `work` until it ends or `stop` is set; its one error, out of its exception groups."""
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
        error = error.exceptions[0]
    if error is not None:
        raise error


def _check_enough(source: TaskSource, *, groups: int, steps: int) -> None:
    if source.epochs is not None and len(source.tasks) * source.epochs < groups * steps:
        raise DataError(
            f"{len(source.tasks)} tasks × {source.epochs} epochs are fewer than the {groups * steps} groups "
            f"that {steps} steps of {groups} need; raise data.epochs or leave it out"
        )
