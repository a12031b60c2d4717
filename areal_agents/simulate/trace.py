"""Estimates simulation parameters from a run: lengths and latencies, the engine's speed, the trainer's times.

A turn is recorded when its generation ends. The duration of an episode's first turn is therefore known (no
tool precedes it), and for a later turn only the sum of tool and generation. The first turns give the times of
the engine, and these give the times of the tools. The number of requests that ran at the same time is
reconstructed from the turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.run_folder import RunFolder
from areal_agents.simulate.engine import StepTime
from areal_agents.simulate.work import EmpiricalWork, EpisodePlan
from areal_agents.store import Store
from areal_agents.store.rows import TurnTime

ROUNDS = 8  # rounds of fitting the engine's times and counting the concurrent requests
LEAST_STEPS, LEAST_EPISODES = 4, 8
WARM_UP = 0.25  # share of the steps that are excluded from the measured step time


@dataclass(frozen=True, slots=True)
class Trace:
    """The estimates from a run.

    Attributes:
        parameters: the estimated parameters, by their names in `Parameters`.
        work: the episodes of the run.
        episodes, steps: the number of episodes and steps that were read.
        step_s: the measured seconds per step, without the first quarter of the steps.
        not_modelled: the settings of the run that the simulation does not have.
    """

    parameters: Mapping[str, Any]
    work: EmpiricalWork
    episodes: int
    steps: int
    step_s: float
    not_modelled: tuple[str, ...]


def read_trace(folder: Path) -> Trace:
    """Read the trace of a run's folder. Raises ConfigError if it is not one, or the run is too short."""
    run = RunFolder(folder)
    if not run.config.is_file():
        raise ConfigError(f"{folder} is not the folder of a run (no {run.config.name} in it)")
    config = load_config(run.config)
    metrics = MetricsFile(run.metrics)
    metrics.update()
    with Store.open(run.store_at(config.store.url)) as store:
        turns = _Turns.of(store.turn_times())
    if len(metrics.rows) < LEAST_STEPS or turns.episodes < LEAST_EPISODES:
        raise ConfigError(
            f"{folder}: a trace needs at least {LEAST_STEPS} steps and {LEAST_EPISODES} episodes, got "
            f"{len(metrics.rows)} and {turns.episodes}; train for longer"
        )
    return _trace(config, metrics.rows, turns)


@dataclass(frozen=True, slots=True, eq=False)
class _Turns:
    """All turns of all episodes, concatenated; every array is [turns], with times in seconds.

    Attributes:
        first: whether the turn is the first of its episode.
        ends: when the turn ended.
        gaps: the time from the end of the previous turn, or the opening of the episode, to the end of the
            turn.
        tokens: the number of sampled tokens.
    """

    first: np.ndarray
    ends: np.ndarray
    gaps: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, recorded: Iterable[TurnTime]) -> _Turns:
        """Collect recorded turns, without episodes with concurrent turns, whose times cannot be separated."""
        rows: list[tuple[bool, float, float, float]] = []
        for _, own in itertools.groupby(recorded, key=lambda turn: turn.episode_id):
            turns = list(own)
            gaps = np.diff([turns[0].opened_at, *(turn.recorded_at for turn in turns)])
            if (gaps > 0).all():
                rows += [
                    (index == 0, turn.recorded_at, gap, max(1, turn.sampled_tokens))
                    for index, (turn, gap) in enumerate(zip(turns, gaps.tolist(), strict=True))
                ]
        columns = np.array(rows, float).reshape(-1, 4).T
        return cls(columns[0].astype(bool), *columns[1:])

    @property
    def episodes(self) -> int:
        """The number of episodes."""
        return int(self.first.sum())

    def generation_s(self, step_time: StepTime, call_s: float, running: np.ndarray) -> np.ndarray:
        """Return the generation time of each turn: the gap of a first turn, and at most that of others."""
        expected = call_s + (step_time.base_s + step_time.per_request_s * running) * self.tokens
        return np.where(self.first, self.gaps, np.minimum(self.gaps, expected))

    def plans(self, generation_s: np.ndarray) -> list[EpisodePlan]:
        """Return the episodes; the rest of each gap besides generation is the time of tools."""
        tools = self.gaps - generation_s
        starts = np.flatnonzero(self.first).tolist()
        return [
            EpisodePlan(tuple(self.tokens[start:end].tolist()), tuple(tools[start + 1 : end].tolist()))
            for start, end in itertools.pairwise([*starts, len(self.first)])
        ]


def _trace(config: Config, rows: Sequence[Mapping[str, Any]], turns: _Turns) -> Trace:
    replicas = len(config.engine.urls) or config.engine.replicas
    step_time, call_s, generation_s, calls_are_told = _engine_times(turns, replicas)
    fixed, per_token = _trainer_times(rows)
    skipped = int(len(rows) * WARM_UP)
    parameters = {
        "groups": config.rollout.groups,
        "group_size": config.rollout.group_size,
        "max_staleness": config.rollout.max_staleness,
        "concurrency": config.rollout.concurrency or config.engine.sequences,
        "engines": replicas,
        "gpus_per_engine": config.engine.tensor_parallel,
        "slots": config.engine.slots,
        "base_s": step_time.base_s,
        "per_request_s": step_time.per_request_s,
        "call_s": call_s,
        "trainers": config.trainer.ranks,
        "trainer_s": fixed,
        "trainer_s_per_token": per_token,
        "publish_s": float(np.mean([row["publish_s"] for row in rows])),
        "pause_s": float(np.mean([row["pause_s"] for row in rows])),
        "interruptible": config.trainer.publish.pause != "drain",
        "seed": config.seed,
    }
    step_s = (rows[-1]["time"] - rows[skipped]["time"]) / (len(rows) - 1 - skipped)
    work = EmpiricalWork(turns.plans(generation_s))
    return Trace(
        parameters, work, turns.episodes, len(rows), step_s, tuple(_not_modelled(config, calls_are_told))
    )


def _not_modelled(config: Config, calls_are_told: bool) -> Iterator[str]:
    rollout = config.rollout
    if not calls_are_told:
        yield "the time of a call besides its tokens (longer first turns did not take longer)"
    if config.loop == "one_step_off":
        yield "loop: one_step_off (simulated as async with max_staleness: 1)"
    if rollout.over_sample:
        yield f"rollout.over_sample: {rollout.over_sample} (no episode is aborted)"
    if rollout.on_stale != "mask":
        yield f"rollout.on_stale: {rollout.on_stale} (simulated as mask)"


def _trainer_times(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the seconds of a step without publishing and waiting: fixed, and per sampled token."""
    work = np.array([max(0.0, row["step_s"] - row["wait_s"] - row["publish_s"]) for row in rows])
    tokens = np.array([row["sampled_tokens"] for row in rows], float)
    fixed, per_token = least_squares(np.stack([np.ones_like(tokens), tokens], 1), work)
    return fixed, per_token


def _engine_times(turns: _Turns, replicas: int) -> tuple[StepTime, float, np.ndarray, bool]:
    """Return a replica's step time, a call's time besides its tokens, each turn's generation time, and
    whether the time of a call could be told from that of tokens.

    It cannot if longer first turns took no longer than shorter ones. All of their time then counts for
    tokens.
    """
    first, tokens = turns.gaps[turns.first], turns.tokens[turns.first]
    step_time, call_s, calls_are_told = StepTime(float((first / tokens).min())), 0.0, True
    running = np.ones(len(turns.tokens))
    for _ in range(ROUNDS):
        spans = turns.generation_s(step_time, call_s, running)
        running = np.maximum(1.0, mean_running(turns.ends - spans, turns.ends) / replicas)
        call_s, base, slope = least_squares(
            np.stack([np.ones_like(tokens), tokens, tokens * running[turns.first]], 1), first
        )
        calls_are_told = base + slope > 0
        if not calls_are_told:
            call_s = 0.0
            base, slope = least_squares(np.stack([tokens, tokens * running[turns.first]], 1), first)
        step_time = StepTime(base, slope)
    return step_time, call_s, turns.generation_s(step_time, call_s, running), calls_are_told


def mean_running(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return [N] the mean number of concurrent spans during each of the spans [N], itself included."""
    times = np.concatenate([starts, ends])
    change = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    at = {name: np.searchsorted(times, moments) for name, moments in (("from", starts), ("to", ends))}
    length = ends - starts
    return np.where(length > 0, (area[at["to"]] - area[at["from"]]) / np.where(length > 0, length, 1), 1.0)


def least_squares(columns: np.ndarray, values: np.ndarray) -> tuple[float, ...]:
    """Return the coefficients [K] ≥ 0 of `columns` [N, K] with the least squared error from `values` [N]; K
    is small.

    They are those of the best subset of the columns whose unconstrained solution has no negative coefficient.
    """
    count = columns.shape[1]
    best, least = np.zeros(count), float((values**2).sum())
    for chosen in itertools.product((False, True), repeat=count):
        subset = np.flatnonzero(chosen)
        if not len(subset):
            continue
        found = np.linalg.lstsq(columns[:, subset], values, rcond=None)[0]
        error = float(((columns[:, subset] @ found - values) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[subset] = found
    return tuple(best.tolist())
