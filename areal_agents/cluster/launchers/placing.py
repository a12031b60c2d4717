"""Chooses the node of each process, and the number of nodes, where a job has nodes that are all alike."""

from __future__ import annotations

from collections.abc import Sequence

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.errors import ConfigError


def nodes_for(processes: Sequence[RoleProcess], gpus_per_node: int) -> int:
    """Return the least number of nodes on which all processes find their GPUs; 1 if they need none."""
    return max(1, len(_filled(processes, gpus_per_node)))


def assigned_nodes(processes: Sequence[RoleProcess], gpus_per_node: int, nodes: int) -> dict[str, int]:
    """Return the node of each process by its name, as a number from 0.

    Those with GPUs fill the nodes one after the other, the largest first. The others use cores that these
    leave, and are spread: the processes of each role over all nodes.

    Raises:
        ConfigError: a process needs more GPUs than a node has, or there are too few nodes.
    """
    filled = _filled(processes, gpus_per_node)
    if len(filled) > nodes:
        raise ConfigError(
            f"engines and trainer need {len(filled)} nodes with {gpus_per_node} GPUs each "
            f"(cluster.gpus_per_node), and the job has {nodes}; raise the launcher's setting `nodes`, or "
            "leave it out"
        )
    placed = {name: number for number, names in enumerate(filled) for name in names}
    return {process.name: placed.get(process.name, process.index % nodes) for process in processes}


def _filled(processes: Sequence[RoleProcess], gpus_per_node: int) -> list[list[str]]:
    """Return the names of the processes with GPUs on each node."""
    names: list[list[str]] = []
    free: list[int] = []
    for process in sorted(processes, key=lambda process: -process.gpus):  # stable: engines by their numbers
        if process.gpus == 0:
            continue
        if process.gpus > gpus_per_node:
            raise ConfigError(
                f"{process.name} needs {process.gpus} GPUs on one node, and cluster.gpus_per_node is "
                f"{gpus_per_node}; use engine.tensor_parallel or trainer.nodes to need fewer"
            )
        node = next((number for number, left in enumerate(free) if left >= process.gpus), None)
        if node is None:
            node = len(free)
            free.append(gpus_per_node)
            names.append([])
        free[node] -= process.gpus
        names[node].append(process.name)
    return names
