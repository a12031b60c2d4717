"""The share of weights that a version changed: bit for bit, in the type that they are published in.

Compared with the folder of the version before, which is kept anyway, so that it costs no memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from areal_agents.errors import TrainingError
from areal_agents.training.stored import Checkpoint


class Density:
    """Counts over the tensors of one version.

    Args:
        before: the folder of the version before; None, or one that cannot be read: nothing is compared.
    """

    def __init__(self, before: Path | None) -> None:
        self._before: Checkpoint | None = None
        self._changed = self._compared = 0
        if before is not None:
            try:
                self._before = Checkpoint(before)
            except TrainingError:  # removed by hand, or of another kind: there is nothing to compare with
                self._before = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Compare a weight, as it is published, with the one of its name and shape before."""
        stored = self._before.tensors.get(name) if self._before is not None else None
        if self._before is None or stored is None or stored.shape != tuple(tensor.shape):
            return
        old = self._before.read(stored)
        self._changed += int(torch.count_nonzero(tensor.to(old.dtype).cpu() != old))
        self._compared += old.numel()

    @property
    def share(self) -> float | None:
        """Changed weights / compared ones; None where nothing was compared."""
        return self._changed / self._compared if self._compared else None
