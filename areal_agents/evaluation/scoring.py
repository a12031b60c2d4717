"""Calls a reward function or an answer function on stored episodes, in worker processes, without a model.

A call that fails, exceeds its time or kills its process is a result like any other, and harms no other call.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_agents.errors import RewardError
from areal_agents.rewards import FinishedEpisode
from areal_agents.rollout.agents.agent_process import ChildProcess
from areal_agents.rollout.config import RewardConfig

START_TIMEOUT_S = 120.0
GRACE_S = 5.0  # beyond the function's own time limit, before its process is killed
ANSWER_TIME_S = 60.0
END_S = 30.0  # longest wait for the end of a process after a cancellation


@dataclass(frozen=True, slots=True)
class ScoringFunction:
    """A user's function of finished episodes, as its worker process is told.

    Attributes:
        settings: see `scoring_worker.main`.
        time_s: the time limit of one call, in seconds.
    """

    kind: Literal["reward", "answer"]
    settings: Mapping[str, Any]
    time_s: float

    @classmethod
    def rewards(cls, config: RewardConfig) -> ScoringFunction:
        """Return the reward function of a configuration."""
        return cls("reward", config.model_dump(mode="json"), config.time_s)

    @classmethod
    def answers(cls, function: str) -> ScoringFunction:
        """Return the function that reads the answer of an episode."""
        return cls("answer", {"function": function, "time_s": ANSWER_TIME_S}, ANSWER_TIME_S)


@dataclass(frozen=True, slots=True)
class Scored:
    """What a function returned for some episodes: one value for each, or why there are none."""

    values: tuple[Any, ...] | None
    error: str | None = None


async def score(
    function: ScoringFunction, batches: Iterable[Sequence[FinishedEpisode]], *, workers: int
) -> list[Scored]:
    """Call a function on each batch of episodes: a single one, or those of a group for a function of groups.

    Batches are taken from the iterable as workers become free, so not all of them are in memory.

    Args:
        workers: the most processes.

    Raises:
        RewardError: the function cannot be loaded.
    """
    results: dict[int, Scored] = {}
    waiting = enumerate(batches)

    async def work(worker: _Worker | None) -> None:
        try:
            for number, batch in waiting:  # shared, so that each batch is taken once
                if worker is None or worker.ended:
                    if worker is not None:
                        await worker.end()
                    worker = await _Worker.start(function)
                results[number] = await worker.score(batch)
        finally:
            if worker is not None:
                await worker.end()

    first = await _Worker.start(function)  # alone, so that a function that cannot be loaded ends nothing else
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(work(None if number else first))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[number] for number in range(len(results))]


class _Worker:
    """One process; `ended` once it cannot take another call."""

    def __init__(self, process: ChildProcess, time_s: float) -> None:
        self._process = process
        self._time_s = time_s
        self.ended = False

    @classmethod
    async def start(cls, function: ScoringFunction) -> _Worker:
        """Start a process that has loaded the function. Raises RewardError if it cannot be loaded."""
        module = "areal_agents.evaluation.scoring_worker"
        command = [sys.executable, "-m", module, function.kind, json.dumps(dict(function.settings))]
        process = await ChildProcess.start(command, environment=os.environ, lines=True)
        worker = cls(process, function.time_s)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.line()
            message = json.loads(line) if line else {"error": "its process ended while it was imported"}
        except TimeoutError:
            message = {"error": f"it was not imported within {START_TIMEOUT_S:g} s"}
        except BaseException:
            await worker.end()
            raise
        if "error" in message:
            await worker.end()
            raise RewardError(message["error"])
        return worker

    async def score(self, batch: Sequence[FinishedEpisode]) -> Scored:
        """Return what the function returns for a batch, which takes one call."""
        self._process.send(
            json.dumps({"episodes": [_as_json(episode) for episode in batch]}).encode() + b"\n"
        )
        try:
            async with asyncio.timeout(self._time_s + GRACE_S):
                line = await self._process.line()
        except TimeoutError:
            self.ended = True
            return Scored(None, f"the function did not return within {self._time_s:g} s, and was ended")
        if not line:
            self.ended = True
            return Scored(None, "the function ended its process")
        message = json.loads(line)
        if "error" in message:
            self.ended = message["last"]
            return Scored(None, message["error"])
        return Scored(tuple(message["values"]))

    async def end(self) -> None:
        """End the process, also if this is cancelled meanwhile."""
        self.ended = True
        ending = asyncio.ensure_future(self._process.end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait({ending}, timeout=END_S)
            raise


def _as_json(episode: FinishedEpisode) -> dict[str, Any]:
    return {
        "id": episode.id,
        "task": episode.task,
        "branches": episode.branches,
        "status": episode.status,
        "rewards": episode.rewards,
    }
