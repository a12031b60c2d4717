"""The isolation `process`: a plain process in a copy of the folder, with limits and a clean environment.

It protects from accidents only: a command can read and write whatever this user can, and has the network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_agents.errors import SandboxError
from areal_agents.sandbox.keeper import Command
from areal_agents.sandbox.local import Layout
from areal_agents.sandbox.sandbox import Mount, SandboxSpec

WORK, HOME = "work", "home"


class Process:
    """See `Local`."""

    name = "process"
    has_namespaces = False

    def layout(self, spec: SandboxSpec, shared: Path) -> Layout:
        if spec.image or spec.writable or spec.workdir:
            raise SandboxError(
                "isolation: process works with the programs and paths of this machine; image, writable and "
                "workdir need bubblewrap or docker"
            )
        copies = {WORK: spec.folder} if spec.folder is not None else {}
        return Layout([HOME, "tmp", *([] if copies else [WORK])], copies=copies)

    def command(
        self,
        spec: SandboxSpec,
        scratch: Path,
        argv: Sequence[str],
        own: Mapping[str, str],
        mounts: Sequence[Mount],
    ) -> Command:
        if mounts:
            raise SandboxError(
                "isolation: process cannot show a folder to one command only; use bubblewrap or docker"
            )
        base = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(scratch / HOME),
            "TMPDIR": str(scratch / "tmp"),
            "LANG": "C.UTF-8",
        }
        disk = spec.limits.disk_mb
        return Command(
            argv,
            {**base, **spec.environment, **own},
            folder=str(scratch / WORK),
            own_network=False,
            file_bytes=disk << 20 if disk is not None else None,
        )

    def workdir(self, spec: SandboxSpec, scratch: Path) -> str:
        return str(scratch / WORK)

    def inner_url(self, url: str) -> str:
        return url
