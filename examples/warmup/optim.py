"""Muon on the matrices inside the layers, AdamW on the embedding and the norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from warmup.network import Network


class Rates(NamedTuple):
    """The base learning rates."""

    muon: float
    adam: float


class Optimizers:
    """Both optimizers under one learning-rate schedule: `scale(step)` multiplies the base rates."""

    def __init__(self, network: Network, rates: Rates, *, scale: Callable[[int], float]) -> None:
        matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and "embedding" not in name]
        chosen = {id(p) for p in matrices}
        rest = [p for p in network.parameters() if id(p) not in chosen]
        self._network = network
        self._scale = scale
        self._rates = rates
        self._optimizers = (
            Muon(matrices, lr=rates.muon),
            torch.optim.AdamW(rest, lr=rates.adam, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        )
        self._step = 0

    def step(self) -> None:
        """Clip the gradient norm to 1, apply it, clear it."""
        nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        factor = self._scale(self._step)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._step += 1


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon without weight decay, in float32.

    That one computes in bfloat16, which takes ten to twenty times as long on a CPU that has no instructions
    for it.
    """

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            momentum = group["momentum"]
            for matrix in group["params"]:
                state = self.state[matrix]
                average = state.setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - momentum)
                update = orthogonal(matrix.grad.lerp(average, momentum))
                rows, columns = matrix.shape
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values brought near 1 by five Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), wide, beta=3.4445)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
