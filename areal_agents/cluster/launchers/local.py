"""Starts all processes on this machine: a cluster of one, to try a configuration before it goes to many."""

from __future__ import annotations

from areal_agents.cluster.launchers.base import RoleProcess


class LocalLauncher:
    """Runs each process as it is."""

    name = "local"

    def check(self) -> None:
        """This machine can always be used."""

    def command(self, process: RoleProcess) -> tuple[str, ...]:
        """Return the command of the process itself."""
        return process.command
