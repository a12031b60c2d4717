"""The inputs of a simulation: a cluster and a run on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_agents.simulate.engine import StepTime
from areal_agents.simulate.work import Work


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run of the training loop; times are in seconds.

    Attributes:
        work: samples the episodes.
        groups, group_size: a batch has B = groups × group_size episodes.
        max_staleness: η of the gate; None: no bound.
        concurrency: the most episodes that run at the same time.
        engines: the number of replicas.
        slots: the most requests that each replica runs at the same time.
        step_time: the duration of a decoding step of one replica.
        call_s: the duration of a model call besides its tokens: proxy, prompt, network.
        trainer_s, trainer_s_per_token: the duration of training a batch: fixed, and per sampled token.
        publish_s: the time of the trainer after each batch, including the swap.
        pause_s: the part of `publish_s` in which the engines pause.
        recompute_s_per_token: the time of an engine after a swap, per token of its running requests.
        interruptible: if False, a swap waits for the running requests, and new ones wait for the swap.
        steps: the number of batches to train; the first `warm_up` are not counted.
        seed: the seed of `work`. The k-th episode is the same in every scenario with the same work and seed.
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
        """B, the number of episodes in a batch."""
        return self.groups * self.group_size


def _check(values: Mapping[str, float], *, least: int) -> None:
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
