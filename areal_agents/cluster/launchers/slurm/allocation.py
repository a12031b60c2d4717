"""What Slurm's commands say of the job that this process is in, and what they do with it.

Slurm takes a node that fails out of the job; the others go on (`--no-kill`), unless it is the first node,
where the batch script runs: then Slurm itself requeues the job.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from areal_agents.errors import ArealAgentsError, ConfigError

COMMAND_S = 60.0  # longest wait for a command of Slurm


class SlurmError(ArealAgentsError):
    """A command of Slurm failed; the message is its own."""


@dataclass(frozen=True, slots=True)
class Step:
    """A job step: a process that runs on a node of the job."""

    id: str
    name: str
    node: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """The job that this process is in.

    Attributes:
        job_id: the number of the job.
        first_nodes: the nodes with which the job started.
        cpus: the number of CPUs of the job on this node.
    """

    job_id: str
    first_nodes: tuple[str, ...]
    cpus: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Allocation:
        """Return the job that the variables of Slurm describe.

        Raises:
            ConfigError: this process is in no job.
        """
        if not is_in_job(environment):
            raise ConfigError("this process is in no Slurm job: SLURM_JOB_ID is not set")
        nodes = _host_names(environment["SLURM_JOB_NODELIST"])
        return cls(environment["SLURM_JOB_ID"], nodes, int(environment.get("SLURM_CPUS_ON_NODE", "1")))

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that the job still has."""
        return _host_names(slurm("squeue", "--noheader", f"--jobs={self.job_id}", "--format=%N").strip())

    def lost_nodes(self) -> tuple[str, ...]:
        """Return the nodes that the job no longer has."""
        left = set(self.nodes())
        return tuple(node for node in self.first_nodes if node not in left)

    def steps(self, name: str) -> list[Step]:
        """Return the running steps of that name; there is more than one only if an earlier one is ending."""
        text = slurm("squeue", "--noheader", "--steps", f"--jobs={self.job_id}", "--format=%i|%j|%N")
        steps = [Step(*line.strip().split("|")) for line in text.splitlines()]
        return [step for step in steps if step.name == name]

    def requeue(self) -> None:
        """Put the job back into the queue, which ends it here and starts it again when there are nodes."""
        slurm("scontrol", "requeue", self.job_id)


def is_in_job(environment: Mapping[str, str]) -> bool:
    """Whether this process is in a Slurm job, as a batch script or in a shell of salloc."""
    return "SLURM_JOB_ID" in environment and "SLURM_JOB_NODELIST" in environment


def slurm(*command: str, stdin: str | None = None) -> str:
    """Run a command of Slurm, and return what it writes.

    Raises:
        SlurmError: it failed, or did not end in time.
    """
    try:
        done = subprocess.run(command, input=stdin or "", capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not end within {COMMAND_S:g} s") from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        raise SlurmError(f"{command[0]} failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _host_names(nodes: str) -> tuple[str, ...]:
    """Return the names in Slurm's compact form, such as node[1-3]."""
    return tuple(slurm("scontrol", "show", "hostnames", nodes).split()) if nodes else ()


def srun_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for srun without what the job asked for, which srun would ask for again."""
    asked = (
        "SLURM_GPUS", "SLURM_GRES", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_MEM_PER", "SLURM_CPUS_PER",
        "SRUN_CPUS_PER", "SLURM_TRES_PER", "SLURM_EXCLUSIVE", "SLURM_THREADS_PER",
    )  # fmt: skip
    return {name: value for name, value in environment.items() if not name.startswith(asked)}
