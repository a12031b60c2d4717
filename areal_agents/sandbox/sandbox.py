"""The interface of sandboxes: what one is started from, what it does, and how a command ended.

Every isolation keeps this contract: the commands of a sandbox run one at a time on the same files; the
processes that a command leaves running are killed before the next one starts; a command has exactly the
environment that it is given; `end` leaves nothing behind. Only a command that is given a `model_url` reaches
the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

KEPT_OUTPUT = 65_536  # bytes of each output stream that are kept by default


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox may use; None: no limit.

    Attributes:
        memory_mb: memory of all its processes together, in MiB.
        processes: its processes and threads together.
        cpus: processor time in cores.
        disk_mb: what it may write in MiB. With bubblewrap its files lie in memory and count as memory too;
            with process it is the size of one file.
    """

    memory_mb: int | None = 4096
    processes: int | None = 512
    cpus: float | None = None
    disk_mb: int | None = 1024

    def __post_init__(self) -> None:
        for name in ("memory_mb", "processes", "cpus", "disk_mb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0 or None, got {value}")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is started from.

    Attributes:
        folder: a folder of this machine; the sandbox works in a copy of it. None: in an empty folder.
        image: the root file system: a folder (bubblewrap), or the name of an image (docker). Empty: the
            programs of this machine (process, bubblewrap).
        workdir: path of the working folder inside. Empty: /workspace; not used by process.
        writable: further folders inside that may be written; /tmp and HOME always may.
        readable: further folders and files of this machine that are shown inside under their own path.
        environment: variables of every command, besides PATH, HOME and LANG. They reach graders too, so they
            must hold no secrets.
        limits: what it may use.
        user: the user id that its processes see as their own; not used with `as_machine`.
        as_machine: with docker only, the container is a machine of its own: its processes are root, may
            write everywhere in the image's files, and have Docker's default capabilities. `writable` and
            `limits.disk_mb` have no effect then.
        network: with docker only, the container has Docker's default network.
    """

    folder: Path | None = None
    image: str = ""
    workdir: str = ""
    writable: tuple[str, ...] = ()
    readable: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    user: int = 1000
    as_machine: bool = False
    network: bool = False

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"the folder {self.folder} does not exist")
        if missing := [path for path in self.readable if not path.exists()]:
            raise ValueError(f"readable: {missing[0]} does not exist")
        for path in (*self.writable, *((self.workdir,) if self.workdir else ())):
            if not path.startswith("/") or ".." in Path(path).parts:
                raise ValueError(f"a path inside a sandbox must be absolute and without '..', got {path!r}")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of this machine that one command sees at the path `inside`."""

    inside: str
    host: Path
    is_writable: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """The end of an output stream.

    Attributes:
        kept: its last bytes.
        length: the number of bytes that were written to it.
    """

    kept: bytes
    length: int

    @property
    def is_cut(self) -> bool:
        """Whether the beginning is missing."""
        return self.length > len(self.kept)

    def text(self) -> str:
        """Return the kept part as text, with a first line that says so if the beginning is missing."""
        text = self.kept.decode(errors="replace")
        return (
            f"[{self.length - len(self.kept)} bytes before this are left out]\n{text}"
            if self.is_cut
            else text
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended.

    Attributes:
        status: its exit status; -N or 128 + N if signal N ended it.
        timed_out: whether it was killed at its time limit.
        out_of_memory: whether the kernel killed a process of it at the memory limit.
    """

    status: int
    stdout: Output
    stderr: Output
    timed_out: bool = False
    out_of_memory: bool = False


class Sandbox(Protocol):
    """A started sandbox."""

    @property
    def workdir(self) -> str:
        """The absolute path of the working folder, as its commands see it."""
        ...

    def inner_url(self, url: str) -> str:
        """Return the URL under which a command that is given `model_url=url` reaches that server."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        streams: tuple[int, int] | None = None,
        kept_bytes: int = KEPT_OUTPUT,
        model_url: str | None = None,
        mounts: Sequence[Mount] = (),
        log: BinaryIO | None = None,
    ) -> Finished:
        """Run a command in the working folder, and end everything that it started.

        Args:
            argv: the program and its arguments.
            timeout_s: wall-clock time in seconds after which it is killed; None: when the call is
                cancelled.
            environment: further variables, for this command only.
            stdin: its standard input.
            streams: file descriptors that are its standard input and its standard output, for a caller that
                talks with it; the caller closes them after the call. In place of `stdin`, and nothing of its
                standard output is kept or logged then.
            kept_bytes: how many of the last bytes of each output stream are kept.
            model_url: the server that it may call; without one, isolations other than process have no
                network.
            mounts: folders that only this command sees.
            log: an open file for the first MiB of its output.

        Raises:
            SandboxError: the command cannot be executed, or the sandbox has ended.
        """
        ...

    async def read(self, path: str, *, most_bytes: int = 1 << 20) -> bytes:
        """Return a file; a relative path is relative to the working folder.

        Links are followed as inside, so they reach no file that a command could not read.

        Raises:
            SandboxError: there is no such file, or it is longer than `most_bytes`.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file and the folders above it. Raises SandboxError if a command could not write it."""
        ...

    async def end(self) -> None:
        """Kill everything in it and remove its files; a second call does nothing."""
        ...


class Isolation(Protocol):
    """Starts sandboxes."""

    name: str

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. Raises SandboxError if it cannot be."""
        ...

    async def close(self) -> None:
        """End every sandbox."""
        ...
