"""A discrete-event simulation of training, to size a cluster: engines, trainer, agents, the gate, and swaps.

The simulation has the rules of the system (groups, gate, oldest first, one swap per step) and takes all times
as parameters. It imports no torch.
"""

from areal_agents.simulate.engine import StepTime
from areal_agents.simulate.loop import SimulationResult, simulate
from areal_agents.simulate.scenario import Scenario
from areal_agents.simulate.work import EmpiricalWork, LogNormal, LogNormalWork, Work

__all__ = [
    "EmpiricalWork", "LogNormal", "LogNormalWork", "Scenario", "SimulationResult", "StepTime", "Work",
    "simulate",
]  # fmt: skip
