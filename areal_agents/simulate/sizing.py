"""Splits GPUs between engines and trainers, and compares with the best synchronous run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_agents.errors import ConfigError
from areal_agents.simulate.loop import SimulationResult, simulate
from areal_agents.simulate.parameters import Parameters
from areal_agents.simulate.work import Work

BOUNDS: tuple[int | None, ...] = (0, 1, 2, 4, 8, None)
TRIED = 12  # splits that are simulated first, evenly spaced; then the neighbours of the best


@dataclass(frozen=True, slots=True)
class Split:
    """A split of the GPUs and its result. With `colocated`, all GPUs generate and then all train."""

    engines: int
    trainers: int
    outcome: SimulationResult
    colocated: bool = False


def with_split(parameters: Parameters, *, engines: int, trainers: int) -> Parameters:
    """Return the same run on other numbers of GPUs.

    The trainers divide a batch evenly, every engine is like the given ones, and concurrency is proportional
    to the number of engines.
    """
    concurrency = parameters.concurrency
    return parameters.model_copy(
        update={
            "engines": engines,
            "trainers": trainers,
            "trainer_s_per_token": parameters.trainer_s_per_token * parameters.trainers / trainers,
            "concurrency": concurrency and max(1, round(concurrency * engines / parameters.engines)),
        }
    )


def splits(parameters: Parameters, work: Work | None, *, gpus: int) -> list[Split]:
    """Simulate splits of `gpus`, and return them by number of engines; the best is among them.

    Raises ConfigError if there are too few GPUs for one engine and one trainer.
    """
    most = (gpus - 1) // parameters.gpus_per_engine
    if most < 1:
        raise ConfigError(
            f"gpus must be at least {parameters.gpus_per_engine + 1}, got {gpus}: an engine needs "
            f"{parameters.gpus_per_engine} and a trainer 1"
        )
    tried: dict[int, Split] = {}

    def try_split(engines: int) -> None:
        if 1 <= engines <= most and engines not in tried:
            trainers = gpus - engines * parameters.gpus_per_engine
            changed = with_split(parameters, engines=engines, trainers=trainers)
            tried[engines] = Split(engines, trainers, simulate(changed.scenario(work)))

    count = min(TRIED, most)
    for number in range(count):
        try_split(1 + round(number * (most - 1) / max(1, count - 1)))
    while True:
        best = fastest(tried.values()).engines
        before = len(tried)
        try_split(best - 1)
        try_split(best + 1)
        if len(tried) == before:
            return [tried[engines] for engines in sorted(tried)]


def synchronous(parameters: Parameters, work: Work | None, *, gpus: int) -> Split:
    """Return the fastest run at η = 0 on `gpus`: the best split, or colocated with no time to change over."""
    parameters = parameters.model_copy(update={"max_staleness": 0})
    everywhere = gpus // parameters.gpus_per_engine
    all_both = with_split(parameters, engines=everywhere, trainers=gpus)
    colocated = Split(everywhere, gpus, simulate(all_both.scenario(work)), colocated=True)
    return fastest([colocated, *splits(parameters, work, gpus=gpus)])


def fastest(found: Iterable[Split]) -> Split:
    """Return the split with the most tokens per second."""
    return max(found, key=lambda split: split.outcome.tokens_per_s)


def bounds(parameters: Parameters, work: Work | None) -> dict[int | None, SimulationResult]:
    """Return the results of the same run under each η of BOUNDS."""
    return {
        bound: simulate(parameters.model_copy(update={"max_staleness": bound}).scenario(work))
        for bound in BOUNDS
    }
