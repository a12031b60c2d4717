"""A discrete-event model of the loop, to size a cluster: engines, trainer, agents, the gate, and swaps.

It knows nothing of the system but its rules (groups, gate, oldest first, a swap per step) and the times that
it is given. Imports no torch.
"""

from areal_agents.simulate.engine import StepTime
from areal_agents.simulate.loop import SimulationResult, simulate
from areal_agents.simulate.scenario import Scenario
from areal_agents.simulate.work import EmpiricalWork, LogNormal, LogNormalWork, Work

__all__ = [
    "EmpiricalWork", "LogNormal", "LogNormalWork", "Scenario", "SimulationResult", "StepTime", "Work",
    "simulate",
]  # fmt: skip
