"""Splits GPUs between engines and trainers, and compares the result with the best synchronous run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_agents.errors import ConfigError
from areal_agents.simulate.loop import SimulationResult, simulate
from areal_agents.simulate.parameters import Parameters
from areal_agents.simulate.work import Work

BOUNDS: tuple[int | None, ...] = (0, 1, 2, 4, 8, None)
TRIED = 12  # splits of a first look, evenly spread; then the neighbours of the best


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs shared out, and what comes of it. `colocated`: all generate, then all train."""

    engines: int
    trainers: int
    outcome: SimulationResult
    colocated: bool = False


def with_split(parameters: Parameters, *, engines: int, trainers: int) -> Parameters:
    """The same run on other numbers of GPUs: a batch is shared by the trainers, and every engine is like
    those given. Concurrency grows with the engines."""
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
    """The splits of `gpus` that were tried, by number of engines; the best is among them.

    ConfigError if there are not enough for one engine and one trainer.
    """
    most = (gpus - 1) // parameters.gpus_per_engine
    if most < 1:
        raise ConfigError(
            f"{gpus} GPUs are too few for an engine of {parameters.gpus_per_engine} and a trainer of one"
        )
    tried: dict[int, Split] = {}

    def look(engines: int) -> None:
        if 1 <= engines <= most and engines not in tried:
            trainers = gpus - engines * parameters.gpus_per_engine
            changed = with_split(parameters, engines=engines, trainers=trainers)
            tried[engines] = Split(engines, trainers, simulate(changed.scenario(work)))

    count = min(TRIED, most)
    for number in range(count):
        look(1 + round(number * (most - 1) / max(1, count - 1)))
    while True:
        best = fastest(tried.values()).engines
        before = len(tried)
        look(best - 1)
        look(best + 1)
        if len(tried) == before:
            return [tried[engines] for engines in sorted(tried)]


def synchronous(parameters: Parameters, work: Work | None, *, gpus: int) -> Split:
    """The fastest run at η = 0 on `gpus`: shared out in the best way, or colocated, changing in no time."""
    parameters = parameters.model_copy(update={"max_staleness": 0})
    everywhere = gpus // parameters.gpus_per_engine
    all_both = with_split(parameters, engines=everywhere, trainers=gpus)
    colocated = Split(everywhere, gpus, simulate(all_both.scenario(work)), colocated=True)
    return fastest([colocated, *splits(parameters, work, gpus=gpus)])


def fastest(found: Iterable[Split]) -> Split:
    """The one with the most tokens per second."""
    return max(found, key=lambda split: split.outcome.tokens_per_s)


def bounds(parameters: Parameters, work: Work | None) -> dict[int | None, SimulationResult]:
    """The same run under each η of BOUNDS."""
    return {
        bound: simulate(parameters.model_copy(update={"max_staleness": bound}).scenario(work))
        for bound in BOUNDS
    }
