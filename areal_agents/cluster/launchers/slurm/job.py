"""The batch job of a run: its script, its submission, and what it does when it is cut short.

It is one job with nodes that are all alike, and no heterogeneous one: the proxies and rollout processes need
no GPUs, and use cores that engines and trainer leave. Slurm can go on without a node of such a job, start its
processes on the others, and requeue it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from areal_agents.cluster.launchers.slurm.allocation import Allocation, SlurmError, slurm
from areal_agents.cluster.launchers.slurm.config import SlurmConfig
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.launch.signals import Interrupted, interruptible

_NEAR_LIMIT = signal.SIGUSR1


def batch_script(
    config: SlurmConfig,
    command: Sequence[str],
    *,
    name: str,
    nodes: int,
    gpus_per_node: int,
    folder: Path,
    output: Path,
) -> str:
    """Return the script of the job.

    Args:
        command: what runs on the first node: the supervisor, with this launcher.
        folder: the working directory of all processes.
        output: the file for the output of the supervisor; %j is the number of the job.
    """
    options = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []),
        *(["--exclusive", "--mem=0"] if config.exclusive else []),
        *(
            f"--{option}={value}"
            for option in ("partition", "account", "qos", "constraint", "time")
            if (value := getattr(config, option))
        ),
        f"--chdir={folder}",
        f"--output={output}",
        "--open-mode=append",
        "--export=ALL",
        "--no-kill",
        "--requeue" if config.requeue else "--no-requeue",
        f"--signal=B:{_NEAR_LIMIT.name.removeprefix('SIG')}@{config.notice_s}",
        *config.extra,
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(option)}" for option in options),
        "",
        *config.setup,
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def submit(script: str) -> str:
    """Submit a batch script, and return the number of the job.

    Raises:
        ConfigError: this machine has no sbatch, or Slurm refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--launcher slurm submits a job with sbatch, which this machine does not have; call it on a "
            "login node of the cluster, or print the script with --dry-run"
        )
    try:
        return slurm("sbatch", "--parsable", stdin=script).strip().partition(";")[0]
    except SlurmError as error:
        raise ConfigError(
            f"cluster.slurm: {error}; check the settings there, and that this machine is one from which the "
            "cluster takes jobs, such as a login node"
        ) from None


@contextmanager
def requeued_when_cut_short(
    config: SlurmConfig, allocation: Allocation, say: Callable[[str], object]
) -> Iterator[None]:
    """Requeue the job if its time limit, or the loss of a node, ends the run in the with-block.

    The run is then continued from its last checkpoint when there are nodes for it. This process gets SIGUSR1
    before the time limit, and the run ends as after SIGTERM.
    """
    near_limit = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal near_limit
        near_limit = True
        say("the time limit of the job is near: the run ends with a checkpoint")
        os.kill(os.getpid(), signal.SIGTERM)

    previous = signal.signal(_NEAR_LIMIT, end)
    try:
        with interruptible():
            yield
    except Interrupted:
        if near_limit:
            _requeue(config, allocation, "its time limit is near", say)
        raise
    except ArealAgentsError as error:
        if lost := allocation.lost_nodes():
            say(str(error))
            _requeue(config, allocation, f"it lost {', '.join(lost)}", say)
        raise
    finally:
        signal.signal(_NEAR_LIMIT, previous)


def _requeue(config: SlurmConfig, allocation: Allocation, reason: str, say: Callable[[str], object]) -> None:
    if not config.requeue:
        say(f"job {allocation.job_id} ends: {reason}; cluster.slurm.requeue is false")
        return
    say(f"job {allocation.job_id} is requeued: {reason}")
    try:
        allocation.requeue()
    except SlurmError as error:  # such as a job of salloc, which has no script to start again
        say(str(error))
