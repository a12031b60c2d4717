"""The models that one runner alternates between: the base model, and a merged copy for each adapter.

They share slots and steps, and nothing else. A model's number is never used for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from areal_agents.inference.embedded.model.runner import ModelRunner
from areal_agents.inference.embedded.model.weights import Weights
from areal_agents.inference.engine import MemoryKind

BASE = 0  # the number of the base model


class ModelSet:
    """The models of one runner, by number. Until `replace`, the runner computes with the weights that it has.

    Attributes:
        without: the kinds of memory that are released; nothing is computed until it is empty.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.without: set[MemoryKind] = set()
        self._runner = runner
        self._weights: dict[int, Weights] = {}
        self._loaded = BASE
        self._retiring: dict[int, Callable[[], None]] = {}

    def replace(self, models: Mapping[int, Weights]) -> None:
        """Replace the served models by `models`, placed weights by number, including BASE. Retired models are
        kept while requests use them."""
        retiring = {n: weights for n, weights in self._weights.items() if n in self._retiring}
        self._weights = {**retiring, **models}
        self._load(BASE)
        self.without.discard("weights")

    def add(self, number: int, weights: Weights) -> None:
        """Add a model, whose number must never have been used before."""
        self._weights[number] = weights

    def retire(self, number: int, dropped: Callable[[], None]) -> None:
        """Let the first `drop_retired` that finds a model unused drop it and call `dropped`."""
        self._retiring[number] = dropped

    @property
    def is_retiring(self) -> bool:
        """Whether a retired model has not been dropped yet."""
        return bool(self._retiring)

    def drop_retired(self, used: set[int]) -> None:
        """Forget the retired models that are not in `used`."""
        for number in self._retiring.keys() - used:
            self._weights.pop(number, None)
            if number == self._loaded and self._weights:
                self._load(BASE)
            self._retiring.pop(number)()

    def take_turn(self, numbers: np.ndarray) -> int:
        """Load the next of the models in `numbers`, in turn, into the runner, and return it."""
        if len(self._weights) > 1:
            waiting = np.unique(numbers)
            later = waiting[waiting > self._loaded]
            number = int(later[0] if len(later) else waiting[0])
            if number != self._loaded:
                self._load(number)
        return self._loaded

    def release(self, kinds: set[MemoryKind]) -> None:
        """Release memory while nothing runs."""
        if "kv_cache" in kinds:
            self._runner.free_cache()
        if "weights" in kinds:
            self._runner.unload()
            self._weights.clear()
        self.without |= kinds

    def allocate_cache(self) -> None:
        """Allocate memory for keys and values again after `release`."""
        if "kv_cache" in self.without:
            self._runner.make_cache()
            self.without.discard("kv_cache")

    def _load(self, number: int) -> None:
        self._runner.load(self._weights[number])
        self._loaded = number
