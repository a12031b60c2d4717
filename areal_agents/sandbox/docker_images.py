"""Images of the isolation `docker`: built once from the folder of a Dockerfile, or pulled by name."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import SandboxError, SandboxUnavailable
from areal_agents.sandbox.docker import check_image_name
from areal_agents.sandbox.docker_client import docker

_ANSWER_S = 30.0  # longest wait for the engine to name its version


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the engine has: its name, and the folder in which its commands start."""

    name: str
    workdir: str


class DockerImages:
    """Builds and pulls images. Callers that need the same image at the same time share one build or pull.

    A caller that is cancelled leaves the build running for the others, and for its own next attempt.
    """

    def __init__(self) -> None:
        self._getting: dict[str, asyncio.Task[Image]] = {}

    async def built(self, folder: Path, *, name: str, timeout_s: float) -> Image:
        """Return the image of a folder with a Dockerfile, built unless the engine has one of this content.

        Args:
            folder: the context of the build.
            name: what the image is called after; the tag is a digest of the folder's content.
            timeout_s: time limit of the build in seconds.

        Raises:
            SandboxError: the build failed, or docker cannot be called.
        """
        digest = await asyncio.to_thread(_digest, folder)
        tag = f"areal-agents/{_repository(name)}:{digest}"

        async def build() -> None:
            words = ["build", "--force-rm", "--tag", tag, str(folder.resolve())]
            await docker(_program(), words, timeout_s=timeout_s)

        return await self._get(tag, build)

    async def named(self, name: str, *, timeout_s: float) -> Image:
        """Return an image by its name, pulled unless the engine has it. Raises SandboxError."""
        check_image_name(name)

        async def pull() -> None:
            await docker(_program(), ["pull", "--quiet", name], timeout_s=timeout_s)

        return await self._get(name, pull)

    async def close(self) -> None:
        """Cancel the builds and pulls that are running."""
        getting = list(self._getting.values())
        for task in getting:
            task.cancel()
        await asyncio.gather(*getting, return_exceptions=True)

    async def _get(self, name: str, make: Callable[[], Awaitable[None]]) -> Image:
        if name not in self._getting:
            task = asyncio.create_task(self._get_once(name, make))
            self._getting[name] = task
            task.add_done_callback(lambda done: self._forget(name, done))
        return await asyncio.shield(self._getting[name])

    def _forget(self, name: str, done: asyncio.Task[Image]) -> None:
        del self._getting[name]
        if not done.cancelled():
            done.exception()  # else asyncio logs it as never retrieved if every caller was cancelled

    async def _get_once(self, name: str, make: Callable[[], Awaitable[None]]) -> Image:
        # `docker image ls` would not do: for a name without a tag it lists the images of every tag.
        inspect = ["image", "inspect", "--format", "{{.Id}} {{.Config.WorkingDir}}", name]
        found = await docker(_program(), inspect, may_fail=True)
        if not found.strip():
            await make()
            found = await docker(_program(), inspect)
        return Image(name, found.decode().partition(" ")[2].strip() or "/")


def engine_answers() -> bool:
    """Return whether docker is installed and its engine answers."""
    program = shutil.which("docker")
    if program is None:
        return False
    try:
        return subprocess.run([program, "version"], capture_output=True, timeout=_ANSWER_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _program() -> str:
    """Return the path of docker. Raises SandboxUnavailable if it is not installed."""
    program = shutil.which("docker")
    if program is None:
        raise SandboxUnavailable("isolation: docker needs the program docker; install Docker")
    return program


def _repository(name: str) -> str:
    """Return a name with only the characters that docker allows in a repository."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "image"


def _digest(folder: Path) -> str:
    """Return a digest of the names, modes and contents of the files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = str(path.relative_to(folder)).encode()
        if path.is_symlink():
            content = b"link " + str(path.readlink()).encode()
        elif path.is_file():
            content = b"file %o " % (path.stat().st_mode & 0o777) + path.read_bytes()
        elif path.is_dir():
            content = b"folder"
        else:
            raise SandboxError(f"{path} is neither a file nor a folder, and cannot be in an image")
        for part in (relative, content):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]
