"""What a launcher does: it says which command runs a process of the run on some machine of the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a launcher's program is imported for each process, and its import should take no time
    from areal_agents.store.roles import Role


@dataclass(frozen=True, slots=True)
class RoleProcess:
    """A process of the run that is to be placed on a machine.

    Attributes:
        command: what runs there.
        gpus: the number of GPUs that it needs, all on one machine.
        cpus: the number of cores.
    """

    role: Role
    index: int
    command: tuple[str, ...]
    gpus: int = 0
    cpus: int = 1

    @property
    def name(self) -> str:
        """The name of the process, which is also that of its log file."""
        return f"{self.role}-{self.index}"


class Launcher(Protocol):
    """Places processes on machines.

    The command of a launcher runs the process elsewhere and stays in the foreground: it passes SIGTERM on,
    brings the output of the process to its own, ends with the exit code of the process, and ends the process
    if it is ended itself.
    """

    name: str

    def check(self) -> None:
        """Raise ConfigError if the cluster cannot be used; the message says what to do."""

    def command(self, process: RoleProcess) -> tuple[str, ...]:
        """Return the command that runs the process on a machine of the cluster."""
