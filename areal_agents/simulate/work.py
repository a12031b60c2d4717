"""The episodes of a simulation, sampled from distributions or from the episodes of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution: `mean` before the cap, `sigma` of the logarithm; values are cut to `cap`."""

    mean: float
    sigma: float = 0.0
    cap: float = math.inf

    def __post_init__(self) -> None:
        if not (self.mean >= 0 and self.sigma >= 0 and self.cap > 0):
            raise ValueError(f"mean and sigma must be at least 0 and cap above 0, got {self}")

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Return [count] values."""
        if self.mean == 0:
            return np.zeros(count)
        return np.minimum(
            random.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count), self.cap
        )


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One episode: the `tokens` of each turn (at least 1), and the seconds `between` consecutive turns."""

    tokens: tuple[float, ...]
    between: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.between) != len(self.tokens) - 1:
            raise ValueError(
                f"{len(self.tokens)} turns need {len(self.tokens) - 1} times between, got {len(self.between)}"
            )


class Work(Protocol):
    """Samples episodes."""

    def sample(self, random: np.random.Generator) -> EpisodePlan:
        """Return the next episode."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormalWork:
    """Episodes of `turns` model calls of log-normal lengths, with a tool between consecutive calls."""

    tokens: LogNormal
    turns: int = 1
    tool_s: LogNormal = LogNormal(0.0)

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns must be at least 1, got {self.turns}")

    def sample(self, random: np.random.Generator) -> EpisodePlan:
        """See `Work.sample`."""
        tokens = np.maximum(1.0, self.tokens.sample(random, self.turns).round())
        return EpisodePlan(tuple(tokens.tolist()), tuple(self.tool_s.sample(random, self.turns - 1).tolist()))


@dataclass(frozen=True, slots=True)
class EmpiricalWork:
    """Samples whole episodes of a recorded run with replacement, so that lengths and latencies stay
    paired."""

    plans: Sequence[EpisodePlan]

    def __post_init__(self) -> None:
        if not self.plans:
            raise ValueError("plans must have at least one episode, got none")

    def sample(self, random: np.random.Generator) -> EpisodePlan:
        """See `Work.sample`."""
        return self.plans[int(random.integers(len(self.plans)))]
