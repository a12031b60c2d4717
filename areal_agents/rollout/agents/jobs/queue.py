"""The interface of a cluster's scheduler to a rollout process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from areal_agents.rollout.agents.jobs.commands import SchedulerCommands

TAIL = 4096  # bytes of a job's output in a message


@dataclass(frozen=True, slots=True)
class NewJob:
    """The job of one attempt at an episode.

    Attributes:
        name: unique, and valid as a name of Kubernetes.
        episode: the id of the episode.
        command: the command as one shell command line.
        variables: the variables by which the command finds its task, the model and its episode.
        time_s: the time limit of the episode in seconds.
        log: an absolute path for the output; None: it is discarded.
    """

    name: str
    episode: str
    command: str
    variables: Mapping[str, str] = field(repr=False)  # with the key of the episode
    time_s: float
    log: Path | None


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job.

    Attributes:
        phase: failed: the command failed. lost: something else ended the job, such as the loss of its node.
            unstarted: something else ended the job before it began, such as its owner by hand.
        detail: why it waits, or how it ended.
        queue: where it waits, such as "the partition gpu of Slurm".
    """

    phase: Literal["waiting", "running", "succeeded", "failed", "lost", "unstarted"]
    detail: str = ""
    queue: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended in any way."""
        return self.phase not in ("waiting", "running")


class JobQueue(Protocol):
    """The jobs of one owner in the queue of a cluster.

    Its methods block, for at most `COMMAND_S` per command of the scheduler, and raise SchedulerError if the
    scheduler does not answer or refuses.

    Attributes:
        commands: runs the commands of the scheduler, and ends those that hang.
    """

    commands: SchedulerCommands

    def submit(self, job: NewJob) -> str:
        """Submit a job, and return the id by which the other methods name it.

        Raises QueueFull if the scheduler takes no further job for now, and Unanswered if it may have taken it
        although it has not said so.
        """
        ...

    def states(self) -> Mapping[str, JobState]:
        """Return the states of all jobs of the owner, also of earlier processes, by one query."""
        ...

    def cancel(self, ids: Collection[str]) -> None:
        """End jobs. A job that has ended, or is not known, is no error."""
        ...

    def output(self, id: str, log: Path | None) -> str:
        """Return the end of what an ended job wrote; its log is complete afterwards."""
        ...
