"""Opens an isolation by name, after it has shown on this machine that it works."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from areal_agents.errors import SandboxError, SandboxUnavailable
from areal_agents.sandbox.bubblewrap import Bubblewrap
from areal_agents.sandbox.docker import DockerIsolation
from areal_agents.sandbox.local import LocalIsolation
from areal_agents.sandbox.process import Process
from areal_agents.sandbox.sandbox import Isolation, Sandbox, SandboxSpec

NAMES = ("process", "bubblewrap", "docker")
_PROBE_S = 30.0
_USERNS = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 or "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container, --privileged), or set isolation: none"
)


async def open_isolation(name: str, spec: SandboxSpec) -> Isolation:
    """Return an isolation that can start sandboxes like `spec`, in which it has run a command.

    Raises:
        SandboxUnavailable: this machine lacks something; says what to do.
        SandboxError: the isolation does not support what `spec` asks for.
    """
    isolation: Isolation
    match name:
        case "process":
            isolation = LocalIsolation(Process())
        case "bubblewrap":
            isolation = LocalIsolation(Bubblewrap())
        case "docker":
            isolation = await DockerIsolation.open()
        case _:
            raise ValueError(f"there is no isolation {name!r}; expected one of {', '.join(NAMES)}")
    try:
        await _probe(isolation, spec)
    except BaseException:
        await isolation.close()
        raise
    return isolation


class IsolationOnFirstUse:
    """An isolation that its first sandbox opens; see `Isolation`. A start that failed is tried again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._opening: asyncio.Task[Isolation] | None = None

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. Raises SandboxError if it cannot be, also if the isolation cannot be opened."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(open_isolation(self.name, spec))
        # Shielded: a cancelled episode must not end the start for which others wait.
        isolation = await asyncio.shield(self._opening)
        return await isolation.start(spec)

    async def close(self) -> None:
        """End every sandbox."""
        opening, self._opening = self._opening, None
        if opening is not None:
            await asyncio.wait({opening})
            if opening.exception() is None:
                await opening.result().close()


async def check_isolation(name: str, spec: SandboxSpec) -> None:
    """Raise what `open_isolation` would raise."""
    await (await open_isolation(name, spec)).close()


async def _probe(isolation: Isolation, spec: SandboxSpec) -> None:
    try:
        sandbox = await isolation.start(replace(spec, folder=None))
        done = await sandbox.run(["/bin/sh", "-c", "exit 0"], timeout_s=_PROBE_S)
        await sandbox.end()
    except SandboxUnavailable:
        raise
    except SandboxError as error:
        if "namespace" not in str(error):
            raise
        raise SandboxUnavailable(f"isolation: {isolation.name}: {error}; {_USERNS}") from error
    if done.status != 0:
        reason = done.stderr.text().strip()
        raise SandboxUnavailable(
            f"isolation: {isolation.name} cannot run a command here: {reason}; {_USERNS}"
        )
