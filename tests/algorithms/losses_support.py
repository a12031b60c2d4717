"""Random tokens in float64, their loss, and numerical derivatives for the oracles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.objective import Objective, policy_loss

Array = npt.NDArray[np.float64]


class Tokens:
    """Tokens of seven sequences of random length, cut into turns; ids are neither sorted nor contiguous."""

    def __init__(self, seed: int, *, drift: float = 0.3, staleness: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 9, 7)
        self.sequence_ids = np.repeat(rng.permutation(50)[:7], lengths)
        n = len(self.sequence_ids)
        self.proximal = rng.uniform(-6, -0.1, n)
        self.current = self.proximal + rng.normal(0, drift, n)
        self.behavior = self.proximal + rng.normal(0, staleness, n)
        self.reference = self.proximal + rng.normal(0, 0.7, n)
        self.advantages = rng.normal(size=n)
        self.per_sequence = np.repeat(rng.normal(size=7), lengths)
        self.loss_weights = rng.uniform(0.01, 0.1, n)
        self.entropy = rng.uniform(0, 2, n)
        begins = rng.random(n) < 0.4  # a turn begins here, and with each sequence
        begins |= np.diff(self.sequence_ids, prepend=-1) != 0
        self.turn_ids = rng.permutation(90)[np.cumsum(begins) - 1]

    def __len__(self) -> int:
        return len(self.current)

    def sequences(self) -> list[npt.NDArray[np.int64]]:
        """The indices of each sequence's tokens."""
        return [np.flatnonzero(self.sequence_ids == i) for i in np.unique(self.sequence_ids)]

    def turns(self) -> list[npt.NDArray[np.int64]]:
        """The indices of each turn's tokens."""
        return [np.flatnonzero(self.turn_ids == i) for i in np.unique(self.turn_ids)]


def evaluate(
    current: Any,
    *,
    dtype: torch.dtype = torch.float64,
    algorithm: AlgorithmConfig | None = None,
    **arrays: Any,
) -> tuple[float, Array, dict[str, float]]:
    """The loss of `policy_loss`, its gradient in `current`, and its statistics.

    By default all weights are 1, and all tokens belong to one sequence.
    """
    theta = torch.as_tensor(current, dtype=dtype).requires_grad_(True)
    arrays.setdefault("loss_weights", np.ones(len(theta)))
    arrays.setdefault("sequence_ids", np.zeros(len(theta)))
    kinds = {"sequence_ids": torch.int64, "turn_ids": torch.int64}
    kinds |= dict.fromkeys(("on_policy", "keep", "trained"), torch.bool)
    tensors = {name: torch.as_tensor(a, dtype=kinds.get(name, dtype)) for name, a in arrays.items()}
    objective = Objective.of(algorithm or AlgorithmConfig())
    loss, statistics, _ = policy_loss(theta, objective, **tensors)
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad.double().numpy(), statistics.as_dict()


def slope(function: Callable[[Array], float], at: Array, *, step: float = 1e-6) -> Array:
    """The gradient of a scalar function by central differences."""
    gradient = np.zeros_like(at)
    for i in range(len(at)):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        gradient[i] = (function(up) - function(down)) / (2 * step)
    return gradient
