"""Derives parameters from a recorded run: lengths, latencies, the engine's speed and the trainer's times.

A turn is recorded when its generation ends, so what an episode's first turn took is known (no tool comes
before it), and of a later one only what tool and generation took together. The first turns give the engine's
times, those give the tools'. How many requests ran beside each is reconstructed from the turns themselves.
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

ROUNDS = 8  # of fitting the engine's times and counting who ran beside whom
LEAST_STEPS, LEAST_EPISODES = 4, 8
WARM_UP = 0.25  # share of the steps that are left out where there are enough


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run has shown.

    Attributes:
        parameters: that explain it, by their names in `Parameters`; work: its episodes.
        episodes, steps: that were read.
        step_s: measured between two steps, after the first quarter of them.
        not_modelled: settings of the run that the simulated loop does not have.
    """

    parameters: Mapping[str, Any]
    work: EmpiricalWork
    episodes: int
    steps: int
    step_s: float
    not_modelled: tuple[str, ...]


def read_trace(folder: Path) -> Trace:
    """The trace of a run's folder. ConfigError if it holds no run, or too little of one."""
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
            f"{folder}: {len(metrics.rows)} steps and {turns.episodes} episodes are too little to go by; it "
            f"takes {LEAST_STEPS} and {LEAST_EPISODES}"
        )
    return _trace(config, metrics.rows, turns)


@dataclass(frozen=True, slots=True, eq=False)
class _Turns:
    """All turns of all episodes, one after the other; every array [turns], times in seconds.

    Attributes:
        first: whether no turn of its episode comes before. gaps: between the end of the turn before, or the
            opening of the episode, and its own end.
    """

    first: np.ndarray
    ends: np.ndarray
    gaps: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, recorded: Iterable[TurnTime]) -> _Turns:
        """Episodes whose turns were sampled side by side are left out: their times cannot be separated."""
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
        """How many there are."""
        return int(self.first.sum())

    def generation_s(self, step_time: StepTime, call_s: float, running: np.ndarray) -> np.ndarray:
        """How long each was generated: a first one all of its gap, any other at most that."""
        expected = call_s + (step_time.base_s + step_time.per_request_s * running) * self.tokens
        return np.where(self.first, self.gaps, np.minimum(self.gaps, expected))

    def plans(self, generation_s: np.ndarray) -> list[EpisodePlan]:
        """The episodes, what is not generation being their tools."""
        tools = self.gaps - generation_s
        starts = np.flatnonzero(self.first).tolist()
        return [
            EpisodePlan(tuple(self.tokens[start:end].tolist()), tuple(tools[start + 1 : end].tolist()))
            for start, end in itertools.pairwise([*starts, len(self.first)])
        ]


def _trace(config: Config, rows: Sequence[Mapping[str, Any]], turns: _Turns) -> Trace:
    replicas = len(config.engine.urls) or config.engine.replicas
    step_time, call_s, generation_s = _engine_times(turns, replicas)
    fixed, per_token = _trainer_times(rows)
    skipped = int(len(rows) * WARM_UP)
    parameters = {
        "groups": config.rollout.groups,
        "group_size": config.rollout.group_size,
        "max_staleness": config.rollout.max_staleness,
        "concurrency": config.rollout.concurrency,
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
    return Trace(parameters, work, turns.episodes, len(rows), step_s, tuple(_not_modelled(config)))


def _not_modelled(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if config.loop == "one_step_off":
        yield "loop: one_step_off (simulated as async with max_staleness: 1)"
    if rollout.over_sample:
        yield f"rollout.over_sample: {rollout.over_sample} (no episode is aborted)"
    if rollout.on_stale != "mask":
        yield f"rollout.on_stale: {rollout.on_stale} (simulated as mask)"


def _trainer_times(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds of a step that are neither publishing nor waiting: fixed, and per sampled token."""
    work = np.array([max(0.0, row["step_s"] - row["wait_s"] - row["publish_s"]) for row in rows])
    tokens = np.array([row["sampled_tokens"] for row in rows], float)
    fixed, per_token = least_squares(np.stack([np.ones_like(tokens), tokens], 1), work)
    return fixed, per_token


def _engine_times(turns: _Turns, replicas: int) -> tuple[StepTime, float, np.ndarray]:
    """A replica's decoding step, a call's time beside its tokens, and how long each turn was generated."""
    first, tokens = turns.gaps[turns.first], turns.tokens[turns.first]
    step_time, call_s = StepTime(float((first / tokens).min())), 0.0
    running = np.ones(len(turns.tokens))
    for _ in range(ROUNDS):
        spans = turns.generation_s(step_time, call_s, running)
        running = np.maximum(1.0, mean_running(turns.ends - spans, turns.ends) / replicas)
        call_s, base, slope = least_squares(
            np.stack([np.ones_like(tokens), tokens, tokens * running[turns.first]], 1), first
        )
        if base + slope <= 0:
            raise ConfigError(
                "the run's first turns show no time per token; it takes a run with turns of different lengths"
            )
        step_time = StepTime(base, slope)
    return step_time, call_s, turns.generation_s(step_time, call_s, running)


def mean_running(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[N] how many of the spans [N] there are at a time during each of them, itself included."""
    times = np.concatenate([starts, ends])
    change = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    at = {name: np.searchsorted(times, moments) for name, moments in (("from", starts), ("to", ends))}
    length = ends - starts
    return np.where(length > 0, (area[at["to"]] - area[at["from"]]) / np.where(length > 0, length, 1), 1.0)


def least_squares(columns: np.ndarray, values: np.ndarray) -> tuple[float, ...]:
    """Coefficients [K] ≥ 0 of `columns` [N, K] that explain `values` [N] best; K is small.

    The best subset of the columns whose plain solution has no negative coefficient.
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
