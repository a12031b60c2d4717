"""The doctor: runs one episode of a user's agent, and reports what prevents or impairs training it."""

from areal_agents.doctor.report import Finding, Report
from areal_agents.doctor.run import examine, read_task
from areal_agents.doctor.show import show

__all__ = ["Finding", "Report", "examine", "read_task", "show"]
