"""Starts nothing: Kubernetes, SkyPilot or a person starts the processes, and the supervisor follows them."""

from __future__ import annotations

import sys

from areal_agents.cluster.launchers.base import RoleProcess


class ExternalLauncher:
    """Follows, for each process, whoever has its place in the run."""

    name = "external"

    def __init__(self, store_url: str) -> None:
        self._store_url = store_url

    def check(self) -> None:
        """What starts the processes is not known here."""

    def command(self, process: RoleProcess) -> tuple[str, ...]:
        """Return the command that follows the process."""
        place = (f"--role={process.role}", f"--index={process.index}")
        return (sys.executable, "-m", "areal_agents.cluster.follow", f"--run={self._store_url}", *place)
