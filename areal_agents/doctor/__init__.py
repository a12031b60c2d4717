"""The doctor: runs one episode of a user's agent, and reports what prevents or impairs training it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_agents.lazy_imports import on_first_use

if TYPE_CHECKING:
    from areal_agents.doctor.report import Finding, Report
    from areal_agents.doctor.run import examine, read_task

__all__ = ["Finding", "Report", "examine", "read_task"]

# The process of a reward function needs none of these modules.
__getattr__ = on_first_use(__name__, {"report": ("Finding", "Report"), "run": ("examine", "read_task")})
