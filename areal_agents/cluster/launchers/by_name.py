"""Finds a launcher by the name that --launcher gives it."""

from __future__ import annotations

from collections.abc import Callable

from areal_agents.cluster.launchers.base import Launcher
from areal_agents.cluster.launchers.external import ExternalLauncher
from areal_agents.cluster.launchers.local import LocalLauncher
from areal_agents.cluster.launchers.ray.launcher import RayLauncher
from areal_agents.cluster.launchers.slurm.launcher import SlurmLauncher
from areal_agents.cluster.train import processes_of
from areal_agents.config import Config
from areal_agents.errors import ConfigError

_LAUNCHERS: dict[str, Callable[[Config], Launcher]] = {
    "local": lambda config: LocalLauncher(),
    "external": lambda config: ExternalLauncher(config.store.url or ""),
    "ray": lambda config: RayLauncher(config.cluster.ray),
    "slurm": lambda config: SlurmLauncher(
        config.cluster.slurm,
        processes_of(config, config.store.url or "", nodes=max(1, config.trainer.nodes)),
        gpus_per_node=config.cluster.gpus_per_node,
    ),
}


def launcher_of(name: str, config: Config) -> Launcher:
    """Return a launcher by its name. ConfigError if there is none of that name."""
    if name not in _LAUNCHERS:
        names = ", ".join((*_LAUNCHERS, "kubernetes", "skypilot"))
        raise ConfigError(f"--launcher must be one of {names}, got {name!r}")
    return _LAUNCHERS[name](config)
