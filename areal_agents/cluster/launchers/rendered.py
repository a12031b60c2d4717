"""Renders a run as a file for another program: manifests for `kubectl apply`, or a task for `sky launch`.

That program then starts every process, including the supervisor, which follows the others (`--launcher
external`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_agents.cluster.launchers.external import ExternalLauncher
from areal_agents.cluster.launchers.kubernetes.certificates import MOUNTED_TLS, certificate_names
from areal_agents.cluster.launchers.kubernetes.manifests import manifests
from areal_agents.cluster.launchers.kubernetes.objects import Run, as_yaml, object_name
from areal_agents.cluster.launchers.skypilot.task import as_yaml as task_yaml
from areal_agents.cluster.launchers.skypilot.task import shares_runs, task
from areal_agents.cluster.train import check_config, processes_of
from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.launch.agent_jobs import check_jobs
from areal_agents.launch.agent_sandbox import sandboxed_agent
from areal_agents.launch.stopping import stop_timeout_s
from areal_agents.rollout.agents.jobs.schedulers import namespace_of
from areal_agents.rollout.config import job_of_agent

_SUBMIT_S = 3600.0  # longest run of the command, in which SkyPilot starts machines


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered run.

    Attributes:
        text: the content of the file, as YAML.
        command: the command that takes the file; "-" stands for its path.
        then: what the user is told when the command has succeeded.
    """

    text: str
    command: tuple[str, ...]
    then: str


def render(launcher: str, path: Path, overrides: Sequence[str] = ()) -> Rendered:
    """Return what a cluster needs to start the run of a configuration file.

    Args:
        launcher: kubernetes or skypilot.

    Raises:
        ConfigError: the configuration cannot be run on several machines, or has a secret.
    """
    config = _with_mounted_tls(load_config(path, overrides, weights=False), launcher)
    check_config(config, ExternalLauncher(config.store.url or ""))
    check_jobs(config, launcher=launcher)
    assert config.store.url is not None  # as was just checked
    name = object_name(config.name)
    processes = processes_of(config, config.store.url, nodes=max(1, config.trainer.nodes))
    if launcher == "skypilot":
        made = task(
            name=name,
            folder=str(path.absolute().parent),
            config_file=path.name,
            config=path.read_text(),
            overrides=overrides,
            store_url=config.store.url,
            processes=processes,
            gpus_per_node=config.cluster.gpus_per_node,
            settings=config.cluster.skypilot,
        )
        if not config.cluster.skypilot.secrets:
            print(
                "cluster.skypilot.secrets is empty, so the nodes get no PGPASSWORD and no token of the run",
                file=sys.stderr,
            )
        if not shares_runs(config.cluster.skypilot):
            # It is no error: `setup` or an image can mount the folder too, which is not seen here.
            print(
                f"cluster.skypilot: no volume and no mounted bucket is at {config.cluster.skypilot.runs}, so "
                "unless setup mounts a file system there, the nodes share no folder of runs: name one in "
                "volumes. What is not on a volume is lost with its machine",
                file=sys.stderr,
            )
        secrets = [f"--secret={secret}" for secret in config.cluster.skypilot.secrets]
        return Rendered(
            task_yaml(made),
            ("sky", "launch", "--yes", "--detach-run", f"--cluster={name}", *secrets, "-"),
            f"to follow the run: sky logs {name}\nto end it: sky down {name}",
        )
    run = Run(
        name=config.name,
        config=path.read_text(),
        overrides=tuple(overrides),
        store_url=config.store.url,
        trainer_stop_s=stop_timeout_s(config),
        processes=processes,
        creates_jobs=(job := job_of_agent(config.agent)) is not None and job.kind == "kubernetes",
        jobs_namespace="" if job is None else namespace_of(job),
    )
    _check_sandbox_pods(config)
    settings = config.cluster.kubernetes
    names = certificate_names(run.name, settings, {process.role for process in processes})
    namespace = ("-n", settings.namespace) if settings.namespace else ()
    kubectl = " ".join(("kubectl", *namespace))
    return Rendered(
        _names_comment(names) + as_yaml(manifests(run, settings)),
        ("kubectl", "apply", "-f", "-"),
        f"to follow the run: {kubectl} logs -f job/{name}-supervisor\n"
        f"to end it: {kubectl} delete jobs,statefulsets -l app.kubernetes.io/instance={name}",
    )


def _with_mounted_tls(config: Config, launcher: str) -> Config:
    """Return the configuration with the files that the pods of a run with certificates have.

    Raises:
        ConfigError: the certificates of the launcher's machines cannot be given in this way.
    """
    settings, tls = config.cluster.kubernetes, config.cluster.tls
    if launcher == "skypilot" and (tls is not None or settings.tls_secret):
        key = "cluster.kubernetes.tls_secret" if tls is None else "cluster.tls"
        raise ConfigError(
            f"{key}: the addresses of the machines that SkyPilot starts are not known before, so no "
            "certificate has them; leave it out, and encrypt below the run, as a VPN does"
        )
    if launcher == "skypilot":
        return config
    if tls is not None:
        raise ConfigError(
            "cluster.tls has files of machines; for Kubernetes leave it out, and name the Secret with the "
            "certificate as cluster.kubernetes.tls_secret"
        )
    if not settings.tls_secret:
        return config
    if config.cluster.sandboxes and not settings.sandbox_tls_secret:
        raise ConfigError(
            "cluster.kubernetes.sandbox_tls_secret: name a Secret with a certificate for the sandbox pods "
            "(cluster.sandboxes); that of tls_secret is kept from the programs that run there"
        )
    cluster = config.cluster.model_copy(update={"tls": MOUNTED_TLS})
    return config.model_copy(update={"cluster": cluster})


def _names_comment(names: Mapping[str, Sequence[str]]) -> str:
    """Return what a certificate of each Secret must be for, as comments of YAML."""
    return "".join(
        f"# The certificate in the Secret {secret} must be for: {', '.join(found)}\n"
        for secret, found in names.items()
    )


def _check_sandbox_pods(config: Config) -> None:
    """Raise ConfigError if the agent has an isolation or limits that a pod without privileges lacks."""
    agent = sandboxed_agent(config)
    if agent is None or not config.cluster.sandboxes:
        return
    if agent.isolation != "process":
        raise ConfigError(
            f"agent.isolation: {agent.isolation} does not work in a sandbox pod, which has no privileges; "
            "set isolation: process: the pod is what isolates (docs/sandboxes.md)"
        )
    limits = agent.limits
    if any(limit is not None for limit in (limits.memory_mb, limits.processes, limits.cpus)):
        raise ConfigError(
            "agent.limits: a pod cannot make cgroups; set memory_mb, processes and cpus to null: the limits "
            "of the pod hold (cluster.kubernetes.memory.sandbox, cluster.cpus.sandbox)"
        )


def submit(rendered: Rendered) -> None:
    """Run the command with the file, and say what to do next.

    Raises:
        ConfigError: the program is not installed, or refuses the file.
    """
    program = rendered.command[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not installed here; install it, or use --dry-run and apply the output"
        )
    with tempfile.NamedTemporaryFile("w", prefix="areal-agents-", suffix=".yaml") as file:
        file.write(rendered.text)
        file.flush()
        command = [file.name if part == "-" else part for part in rendered.command]
        try:
            code = subprocess.run(command, timeout=_SUBMIT_S).returncode
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{' '.join(command)} did not end within {_SUBMIT_S:g} s") from None
    if code:
        raise ConfigError(f"{' '.join(command)} failed with exit code {code}")
    print(rendered.then)
