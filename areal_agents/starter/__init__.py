"""Starter projects: `areal-agents init FOLDER` writes one that runs as it is."""

from areal_agents.starter.project import FRAMEWORKS, create_project

__all__ = ["FRAMEWORKS", "create_project"]
