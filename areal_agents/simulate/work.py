"""The work of an episode: tokens per turn and seconds per tool call, sampled or taken from a recorded run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution: `mean` before the cap, `sigma` of the logarithm; larger values are cut."""

    mean: float
    sigma: float = 0.0
    cap: float = math.inf

    def __post_init__(self) -> None:
        if not (self.mean >= 0 and self.sigma >= 0 and self.cap > 0):
            raise ValueError(f"mean and sigma must be at least 0 and cap above 0, got {self}")

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """[count] values."""
        if self.mean == 0:
            return np.zeros(count)
        return np.minimum(
            random.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count), self.cap
        )


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One episode: `tokens` of each turn (at least 1), and the seconds `between` each two of them."""

    tokens: tuple[float, ...]
    between: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.between) != len(self.tokens) - 1:
            raise ValueError(f"{len(self.tokens)} turns have {len(self.tokens) - 1} times between them")


class Work(Protocol):
    """Draws episodes."""

    def draw(self, random: np.random.Generator) -> EpisodePlan:
        """The next episode."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormalWork:
    """`turns` model calls of log-normal lengths with a tool between each two."""

    tokens: LogNormal
    turns: int = 1
    tool_s: LogNormal = LogNormal(0.0)

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns must be at least 1, got {self.turns}")

    def draw(self, random: np.random.Generator) -> EpisodePlan:
        """See Work."""
        tokens = np.maximum(1.0, self.tokens.draw(random, self.turns).round())
        return EpisodePlan(tuple(tokens.tolist()), tuple(self.tool_s.draw(random, self.turns - 1).tolist()))


@dataclass(frozen=True, slots=True)
class EmpiricalWork:
    """Whole episodes of a recorded run, sampled with replacement: lengths and latencies stay together."""

    plans: Sequence[EpisodePlan]

    def __post_init__(self) -> None:
        if not self.plans:
            raise ValueError("there is no episode to draw from")

    def draw(self, random: np.random.Generator) -> EpisodePlan:
        """See Work."""
        return self.plans[int(random.integers(len(self.plans)))]
