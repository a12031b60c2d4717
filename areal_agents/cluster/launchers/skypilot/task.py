"""Makes the task of a run for SkyPilot, as a plain object.

Every node runs the same command, and the number that SkyPilot gives it, SKYPILOT_NODE_RANK, says which of
the run's processes are on it. The first one has the supervisor too. A task has no secret, as manifests have
none: it names variables, whose values `sky launch --secret` gives.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.config_secrets import refuse_secrets
from areal_agents.cluster.launchers.placing import nodes_for
from areal_agents.cluster.launchers.skypilot.config import SkyPilotConfig
from areal_agents.errors import ConfigError


def task(
    *,
    name: str,
    folder: str,
    config_file: str,
    config: str,
    overrides: Sequence[str],
    store_url: str,
    processes: Sequence[RoleProcess],
    gpus_per_node: int,
    settings: SkyPilotConfig,
) -> dict[str, Any]:
    """Return the task of a run.

    Args:
        name: of the run, in lower-case letters, digits and dashes.
        folder: the folder of the configuration file, which is copied to the nodes.
        config_file: the name of the file in it.
        config: its text.
        overrides: `key=value` arguments of the command line.
        processes: every process of the run but the supervisor.

    Raises:
        ConfigError: the configuration has a secret, or GPUs are needed and not named.
    """
    refuse_secrets(config, overrides)
    needs_gpus = any(process.gpus for process in processes)
    if needs_gpus and not settings.accelerator:
        raise ConfigError("cluster.skypilot.accelerator: name the GPU of the nodes, such as H100")
    accelerators = {"accelerators": f"{settings.accelerator}:{gpus_per_node}"} if needs_gpus else {}
    made: dict[str, Any] = {
        "name": name,
        "num_nodes": settings.nodes or nodes_for(processes, gpus_per_node),
        "resources": {**accelerators, **settings.resources},
        "workdir": folder,
        "setup": settings.setup,
        "run": _script(name, config_file, overrides, store_url, settings.runs),
    }
    for key, given in (("volumes", settings.volumes), ("file_mounts", settings.file_mounts)):
        if given:
            made[key] = dict(given)
    if settings.secrets:
        made["secrets"] = dict.fromkeys(settings.secrets)
    return made


def shares_runs(settings: SkyPilotConfig) -> bool:
    """Whether a volume, or the mount of a bucket, is known to be at the folder of runs or above it.

    What a file mount copies is not shared: files of the user's machine, and a bucket that is named by its URL
    only.
    """
    mounts = {*settings.volumes}
    for path, source in settings.file_mounts.items():
        if isinstance(source, Mapping) and str(source.get("mode", "MOUNT")).upper() != "COPY":
            mounts.add(path)
    runs = PurePosixPath(settings.runs)
    return any(runs.is_relative_to(PurePosixPath(path)) for path in mounts)


def as_yaml(made: Mapping[str, Any]) -> str:
    """Return a task as YAML, with its script as lines."""
    return yaml.dump(dict(made), Dumper=_Dumper, sort_keys=False, width=1000)


def _script(name: str, config_file: str, overrides: Sequence[str], store_url: str, runs: str) -> str:
    supervisor = shlex.join(
        [
            *("areal-agents", "train", config_file, "--launcher", "external", *overrides),
            *(f"name={name}", f"run_dir={runs}/{name}"),
        ]
    )
    node = f"python -m areal_agents.cluster.node --run {shlex.quote(store_url)}"
    node += ' --node "$SKYPILOT_NODE_RANK" --nodes "$SKYPILOT_NUM_NODES"'
    return (
        'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then\n'
        f"  exec {node} -- {supervisor}\n"
        "fi\n"
        f"exec {node}\n"
    )  # fmt: skip


class _Dumper(yaml.SafeDumper):
    """Writes strings of several lines as such."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
