"""The frozen reference policy, which the policy is kept close to.

With an adapter it needs no memory of its own: the base weights of the policy never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.training.model.lora import adapters_off
from areal_agents.training.model.model import Policy, PolicyOutput


@dataclass(frozen=True, slots=True)
class BaseOfAdapter:
    """The reference policy of a run that trains an adapter: the policy itself with the adapter off."""

    policy: Policy

    def __call__(self, batch: MicroBatch) -> PolicyOutput:
        """As the policy; no gradient reaches the adapter."""
        with adapters_off(self.policy.model):
            output: PolicyOutput = self.policy(batch)
        return output

    def modules(self) -> Iterator[nn.Module]:
        """The modules that hold its weights."""
        return self.policy.modules()


Reference = Policy | BaseOfAdapter
