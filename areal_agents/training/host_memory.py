"""Host memory for weights and optimizer state that are on a GPU only while they are needed there.

Each tensor has one place, allocated when it first leaves the GPU and used again every time. The memory is
page-locked where there is a GPU, so that copies run at the full speed of the bus.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

K = TypeVar("K", bound=Hashable)


class HostPlaces:
    """The places of a set of tensors.

    Args:
        pinned: whether the memory is page-locked. torch rounds each allocation of such memory up to a power
            of two.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._places: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def store(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Copy each tensor to the place of its key; return the places, sharded like the tensors.

        Copies from a GPU are complete after `torch.cuda.synchronize`.
        """
        stored = {}
        for key, tensor in tensors.items():
            place = self._places.get(key)
            if place is None:
                place = torch.empty_like(tensor.detach(), device="cpu", pin_memory=self._pinned)
                self._places[key] = place
            stored[key] = place.copy_(tensor.detach(), non_blocking=True)
        return stored


class Parking:
    """Keeps models and their optimizers in host memory while engines use the GPU.

    The models are loaded parked. Buffers, which are small, stay on the GPU.

    Args:
        modules: the roots of the models.
        optimizers: those whose state is on the device during a step; not those that keep it in host memory
            themselves.
        device: where they compute.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        self._modules, self._optimizers, self._device = tuple(modules), tuple(optimizers), device
        self._host = HostPlaces(pinned=device.type == "cuda")

    def fetch(self) -> None:
        """Copy everything to the device."""
        for module in self._modules:
            module.to(self._device, non_blocking=True)
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name, value in moments(state).items():
                    state[name] = value.to(self._device, non_blocking=True)

    def park(self) -> None:
        """Copy everything to host memory, and give up the memory of the device. There are no gradients."""
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                keyed = {(id(parameter), name): value for name, value in moments(state).items()}
                state.update({name: value for (_, name), value in self._host.store(keyed).items()})
        for module in self._modules:
            module._apply(self._parked)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _parked(self, tensor: Tensor) -> Tensor:
        """The host's copy of a parameter, whose identity `_apply` preserves; buffers are left alone."""
        if not isinstance(tensor, nn.Parameter):
            return tensor
        return self._host.store({id(tensor): tensor})[id(tensor)]


def moments(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of a parameter's optimizer state that are as large as the parameter. Counters (tensors
    without a dimension) stay where they are."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim}
