"""The policy losses that `algorithm.policy_loss` chooses among; a new loss needs a file and a line here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from areal_agents.algorithms.losses.cispo import CispoLoss
from areal_agents.algorithms.losses.distillation import DistillationLoss
from areal_agents.algorithms.losses.dpo import DpoLoss
from areal_agents.algorithms.losses.dppo import DppoLoss
from areal_agents.algorithms.losses.gspo import GspoLoss
from areal_agents.algorithms.losses.likelihood import SftLoss
from areal_agents.algorithms.losses.ppo import PpoLoss
from areal_agents.algorithms.losses.sapo import SapoLoss
from areal_agents.algorithms.losses.unclipped import UnclippedLoss

PolicyLoss = Annotated[
    PpoLoss
    | GspoLoss
    | CispoLoss
    | SapoLoss
    | DistillationLoss
    | DppoLoss
    | UnclippedLoss
    | SftLoss
    | DpoLoss,
    Field(discriminator="kind"),
]  # fmt: skip
