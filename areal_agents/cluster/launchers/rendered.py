"""Runs that are handed over as a text: the manifests for `kubectl apply`, the task for `sky launch`.

Something else then starts every process, also the supervisor, which follows the others (`--launcher
external`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_agents.cluster.launchers.external import ExternalLauncher
from areal_agents.cluster.launchers.kubernetes.manifests import Run, as_yaml, manifests, object_name
from areal_agents.cluster.train import check_config, processes_of
from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.launch.stopping import stop_timeout_s

_SUBMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Rendered:
    """What is handed over.

    Attributes:
        text: YAML.
        command: the program that takes it on standard input.
        then: what the user is told when it has.
    """

    text: str
    command: tuple[str, ...]
    then: str


def render(launcher: str, path: str | Path, overrides: Sequence[str] = ()) -> Rendered:
    """Return what a cluster needs to start the run of a configuration file.

    Raises:
        ConfigError: the configuration cannot be run on several machines, or has a secret.
    """
    config = load_config(path, overrides, weights=False)
    check_config(config, ExternalLauncher(config.store.url or ""))
    assert config.store.url is not None  # as was just checked
    run = Run(
        name=config.name,
        config=Path(path).read_text(),
        overrides=tuple(overrides),
        store_url=config.store.url,
        trainer_stop_s=stop_timeout_s(config),
        processes=processes_of(config, config.store.url, nodes=max(1, config.trainer.nodes)),
    )
    name = object_name(config.name)
    settings = config.cluster.kubernetes
    namespace = ("-n", settings.namespace) if settings.namespace else ()
    kubectl = " ".join(("kubectl", *namespace))
    return Rendered(
        as_yaml(manifests(run, settings)),
        ("kubectl", "apply", "-f", "-"),
        f"to follow the run: {kubectl} logs -f job/{name}-supervisor\n"
        f"to end it: {kubectl} delete jobs,statefulsets -l app.kubernetes.io/instance={name}",
    )


def submit(rendered: Rendered) -> str:
    """Hand it over, and return what the program answers, and what to do next.

    Raises:
        ConfigError: the program is not installed, or refuses it.
    """
    program = rendered.command[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not installed here; install it, or use --dry-run and apply the output"
        )
    try:
        done = subprocess.run(
            rendered.command, input=rendered.text, capture_output=True, text=True, timeout=_SUBMIT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{' '.join(rendered.command)} did not end within {_SUBMIT_S:g} s") from None
    if done.returncode:
        raise ConfigError(
            f"{' '.join(rendered.command)} failed: {done.stderr.strip() or done.stdout.strip()}"
        )
    return f"{done.stdout.strip()}\n{rendered.then}"
