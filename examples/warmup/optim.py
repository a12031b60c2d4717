"""Muon on the matrices inside the layers, AdamW on the embedding and the norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from warmup.network import Network


class Optimizers:
    """Both optimizers under one learning-rate schedule: `scale(step)` multiplies the base rates."""

    def __init__(
        self, network: Network, *, muon_lr: float, adam_lr: float, scale: Callable[[int], float]
    ) -> None:
        matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and "embedding" not in name]
        chosen = {id(p) for p in matrices}
        rest = [p for p in network.parameters() if id(p) not in chosen]
        self._network = network
        self._scale = scale
        self._rates = (muon_lr, adam_lr)
        self._optimizers = (
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0),
            torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
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
