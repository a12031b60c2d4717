"""A cluster and a run on it: the inputs of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_agents.simulate.engine import StepTime
from areal_agents.simulate.work import Work


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run of the loop.

    Attributes:
        work: draws the episodes.
        groups, group_size: B = groups × group_size episodes make a batch.
        max_staleness: η of the gate; None: no bound.
        concurrency: episodes that run at the same time.
        engines, slots: replicas, and the requests that each runs at a time.
        step_time: of one replica.
        call_s: of every model call, beside its tokens: proxy, prompt, network.
        trainer_s, trainer_s_per_token: of training a batch, fixed and by its sampled tokens.
        publish_s: of the trainer after each batch, the swap included. pause_s: of it, how long engines stop.
        recompute_s_per_token: of the engine after a swap, by the tokens that its running requests have.
        interruptible: False: a swap waits for the requests that run, and new ones wait for it.
        steps: batches to be trained; the first `warm_up` are not counted.
        seed: of the draws. The k-th episode is the same in every scenario with the same work and seed.
    """

    work: Work
    groups: int
    group_size: int
    max_staleness: int | None
    concurrency: int
    step_time: StepTime
    engines: int = 1
    slots: int = 256
    call_s: float = 0.0
    trainer_s: float = 0.0
    trainer_s_per_token: float = 0.0
    publish_s: float = 0.0
    pause_s: float = 0.0
    recompute_s_per_token: float = 0.0
    interruptible: bool = True
    steps: int = 30
    warm_up: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {
            name: getattr(self, name)
            for name in ("groups", "group_size", "concurrency", "engines", "slots", "steps")
        }
        times = {
            name: getattr(self, name)
            for name in (
                "call_s", "trainer_s", "trainer_s_per_token", "publish_s", "pause_s", "recompute_s_per_token",
            )
        }  # fmt: skip
        _check(counts, least=1)
        _check(times, least=0)
        _check({"warm_up": self.warm_up, "max_staleness": self.max_staleness or 0}, least=0)
        if self.warm_up >= self.steps:
            raise ValueError(f"warm_up must be less than steps, got {self.warm_up} and {self.steps}")

    @property
    def batch(self) -> int:
        """B, in episodes."""
        return self.groups * self.group_size


def _check(values: Mapping[str, float], *, least: int) -> None:
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
