"""Supervises a run whose processes are placed on hosts of `namespaces`, as the launcher of a cluster does.

python supervise_in_namespaces.py CONFIG PLACES KEY=VALUE…    (PLACES: a JSON file, from process to program)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.train import train_on_cluster
from areal_agents.config import load_config


class NamespaceLauncher:
    """Runs each process with its program, which enters a namespace."""

    name = "namespaces"

    def __init__(self, programs: dict[str, str]) -> None:
        self._programs = programs

    def check(self) -> None:
        """Check nothing, because the test has created the namespaces."""

    def command(self, process: RoleProcess) -> tuple[str, ...]:
        """Return the command that runs the process in its namespace."""
        return (self._programs[process.name], *process.command)


if __name__ == "__main__":
    config = load_config(Path(sys.argv[1]), sys.argv[3:])
    train_on_cluster(config, NamespaceLauncher(json.loads(Path(sys.argv[2]).read_text())), console=Console())
