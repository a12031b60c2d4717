"""A sandbox of this machine: a keeper and cgroups around commands that an isolation completes.

`process` and `bubblewrap` differ in the folders that a sandbox starts with and in the command that is really
executed; everything else is here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from areal_agents.errors import SandboxError
from areal_agents.sandbox.cgroups import CgroupHome, find_home, out_of_memory_kills, remove
from areal_agents.sandbox.files import read_file, write_file
from areal_agents.sandbox.home import SandboxHome
from areal_agents.sandbox.keeper import Command, Keeper, Launcher
from areal_agents.sandbox.output import Log
from areal_agents.sandbox.sandbox import KEPT_OUTPUT, Finished, Mount, SandboxSpec


class Local(Protocol):
    """What an isolation of this machine adds."""

    name: str
    has_namespaces: bool

    def layout(self, spec: SandboxSpec, shared: Path) -> Layout:
        """Return the folders of a sandbox, and fill `shared`, the folder that its sandboxes have in common.

        Raises:
            SandboxError: the isolation cannot start from `spec`.
        """
        ...

    def command(
        self,
        spec: SandboxSpec,
        scratch: Path,
        argv: Sequence[str],
        own: Mapping[str, str],
        mounts: Sequence[Mount],
    ) -> Command:
        """Return what is executed in place of `argv`, with the variables `own` and those of every command."""
        ...

    def workdir(self, spec: SandboxSpec, scratch: Path) -> str:
        """Return the path of the working folder as commands see it."""
        ...

    def inner_url(self, url: str) -> str:
        """See `Sandbox.inner_url`."""
        ...


class Layout:
    """Folders and copies to make in the scratch folder of a sandbox, by relative name."""

    def __init__(
        self,
        folders: Sequence[str],
        copies: Mapping[str, Path] | None = None,
    ) -> None:
        self.folders = list(folders)
        self.copies = {name: str(path.resolve()) for name, path in (copies or {}).items()}


class LocalIsolation:
    """Starts sandboxes of one isolation on this machine."""

    def __init__(self, local: Local, *, base: Path | None = None) -> None:
        """Args:
        base: the folder of the sandboxes of all owners; None: one in the system's temporary folder.
        """
        self.name = local.name
        self._local = local
        self._home = SandboxHome.open(base)
        self._launcher: Launcher | None = None
        self._sandboxes: set[LocalSandbox] = set()
        self._cgroups: dict[tuple[bool, bool, bool], CgroupHome | None] = {}

    async def start(self, spec: SandboxSpec) -> LocalSandbox:
        """Start a sandbox. Raises SandboxError if it cannot be."""
        if spec.as_machine or spec.network:
            raise SandboxError(
                f"isolation: {self.name} gives a sandbox no network and cannot make it a machine of its own: "
                "set isolation: docker"
            )
        if self._launcher is None:
            self._launcher = Launcher(self._home)
        layout = self._local.layout(spec, self._home.folder)
        cgroups = self._cgroup_home(spec)
        name = self._home.new_name(cgroups)
        scratch = self._home.folder / name
        scratch.mkdir(mode=0o700)
        folders = cgroups.create(name, spec.limits) if cgroups is not None else ()
        disk = spec.limits.disk_mb
        request = {
            "scratch": str(scratch),
            "namespaces": self._local.has_namespaces,
            "disk_bytes": disk << 20 if disk is not None else None,
            "cgroups": [str(folder) for folder in folders],
            "folders": layout.folders,
            "copies": layout.copies,
            "doing": "",
        }
        try:
            keeper = await self._launcher.keeper(request)
        except BaseException:
            remove(list(folders))
            with contextlib.suppress(OSError):
                scratch.rmdir()
            raise
        sandbox = LocalSandbox(self._local, spec, scratch, keeper, folders, self._sandboxes.discard)
        self._sandboxes.add(sandbox)
        return sandbox

    async def close(self) -> None:
        """End every sandbox and the launcher."""
        await asyncio.gather(*(sandbox.end() for sandbox in list(self._sandboxes)))
        if self._launcher is not None:
            await asyncio.to_thread(self._launcher.close)
            self._launcher = None
        self._home.close()

    def _cgroup_home(self, spec: SandboxSpec) -> CgroupHome | None:
        limits = spec.limits
        needed = (limits.memory_mb is not None, limits.processes is not None, limits.cpus is not None)
        if needed not in self._cgroups:
            self._cgroups[needed] = find_home(limits)
        return self._cgroups[needed]


class LocalSandbox:
    """See `Sandbox`."""

    def __init__(
        self,
        local: Local,
        spec: SandboxSpec,
        scratch: Path,
        keeper: Keeper,
        cgroups: tuple[Path, ...],
        ended: Callable[[LocalSandbox], None],
    ) -> None:
        self._local = local
        self._spec = spec
        self._scratch = scratch
        self._keeper = keeper
        self._cgroups = cgroups
        self._ended = ended

    @property
    def workdir(self) -> str:
        return self._local.workdir(self._spec, self._scratch)

    def inner_url(self, url: str) -> str:
        return self._local.inner_url(url)

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
        if not argv:
            raise SandboxError("the command is empty")
        command = self._local.command(self._spec, self._scratch, argv, environment or {}, mounts)
        before = out_of_memory_kills(self._cgroups)
        finished = await self._keeper.run(
            command,
            stdin=stdin,
            streams=streams,
            timeout_s=timeout_s,
            kept_bytes=kept_bytes,
            model_url=model_url,
            log=Log(log) if log is not None else None,
        )
        killed = out_of_memory_kills(self._cgroups) > before
        return Finished(finished.status, finished.stdout, finished.stderr, finished.timed_out, killed)

    async def read(self, path: str, *, most_bytes: int = 1 << 20) -> bytes:
        return await read_file(self, path, most_bytes=most_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await write_file(self, path, data)

    async def end(self) -> None:
        await self._keeper.end()
        self._ended(self)
