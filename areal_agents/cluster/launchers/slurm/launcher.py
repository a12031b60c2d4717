"""Starts the processes of a run as steps of the Slurm job that this process is in."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from functools import cached_property

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.placing import assigned_nodes, nodes_for
from areal_agents.cluster.launchers.slurm.allocation import Allocation
from areal_agents.cluster.launchers.slurm.config import SlurmConfig
from areal_agents.errors import ConfigError


class SlurmLauncher:
    """Places the processes of one run on the nodes of a job.

    Args:
        processes: all processes of the run.
        gpus_per_node: the number of GPUs that the job has on each node.
    """

    name = "slurm"

    def __init__(self, config: SlurmConfig, processes: Sequence[RoleProcess], *, gpus_per_node: int) -> None:
        self._config = config
        self._processes = processes
        self._gpus_per_node = gpus_per_node

    def check(self) -> None:
        """Raise ConfigError if this process is in no job, or in one that is too small."""
        missing = [name for name in ("srun", "squeue", "scontrol", "scancel") if shutil.which(name) is None]
        if missing:
            raise ConfigError(
                f"--launcher slurm needs {', '.join(missing)}, which this machine does not have"
            )
        assert set(self._nodes) == {process.name for process in self._processes}

    def command(self, process: RoleProcess) -> tuple[str, ...]:
        """Return the command that runs the process as a step on its node."""
        cpus = 1
        if process.gpus:  # the cores of a node are divided as its GPUs are
            cpus = max(1, self._allocation.cpus * process.gpus // self._gpus_per_node)
        return (
            *(sys.executable, "-m", "areal_agents.cluster.launchers.slurm.step"),
            *(f"--name={process.name}", f"--node={self._nodes[process.name]}"),
            *(f"--gpus={process.gpus}", f"--cpus={cpus}", f"--wait-s={self._config.step_wait_s}", "--"),
            *process.command,
        )

    @cached_property
    def _allocation(self) -> Allocation:
        return Allocation.of(os.environ)

    @cached_property
    def _nodes(self) -> dict[str, int]:
        job, has = self._allocation.job_id, len(self._allocation.first_nodes)
        needed = nodes_for(self._processes, self._gpus_per_node)
        if needed > has:
            raise ConfigError(
                f"the run needs {needed} nodes with {self._gpus_per_node} GPUs each, and job {job}, in which "
                f"this command runs, has {has}; outside of a job, it submits one that is large enough"
            )
        return assigned_nodes(self._processes, self._gpus_per_node, has)
