"""Starts the sandboxes of Harbor's tasks: in Docker from their images, or in bubblewrap without images."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from areal_agents.environments.adapters.harbor_folder import DOCKERFILE, HarborTask
from areal_agents.environments.line import EnvironmentLine
from areal_agents.errors import TaskEnvironmentError
from areal_agents.sandbox.docker_images import DockerImages, engine_answers
from areal_agents.sandbox.isolations import IsolationOnFirstUse
from areal_agents.sandbox.sandbox import Limits, Sandbox, SandboxSpec

logger = logging.getLogger(__name__)

ISOLATIONS = ("auto", "docker", "bubblewrap")
_NAMED = 5  # most tasks that an error names


class TaskSandboxes(Protocol):
    """Starts sandboxes of tasks."""

    async def start(self, task: HarborTask) -> Sandbox:
        """Start a sandbox in the state in which the task begins. Raises SandboxError if it cannot be."""
        ...

    async def close(self) -> None:
        """End every sandbox."""
        ...


def task_sandboxes(
    line: EnvironmentLine,
    tasks: Sequence[HarborTask],
    *,
    isolation: str,
    network: bool,
    ignore_dockerfile: bool,
) -> TaskSandboxes:
    """Return an object that starts the sandboxes of tasks.

    Args:
        isolation: "docker", "bubblewrap", or "auto": docker if an engine answers.
        network: whether tasks that do not restrict the network get one; docker only.
        ignore_dockerfile: whether lines of a Dockerfile that need Docker are left out in bubblewrap.

    Raises:
        TaskEnvironmentError: bubblewrap cannot make the sandbox of a task, or an option has no such value.
    """
    if isolation not in ISOLATIONS:
        raise TaskEnvironmentError(
            f"{line.text!r}: isolation must be {', '.join(ISOLATIONS)}, got {isolation!r}"
        )
    if isolation == "auto":
        isolation = "docker" if not ignore_dockerfile and engine_answers() else "bubblewrap"
        logger.info("the tasks of %s are played with isolation=%s", line.text, isolation)
    if isolation == "docker":
        if ignore_dockerfile:
            raise TaskEnvironmentError(
                f"{line.text!r}: isolation=docker builds the Dockerfiles; ignore_dockerfile is for bubblewrap"
            )
        return DockerSandboxes(network=network)
    if network:
        raise TaskEnvironmentError(
            f"{line.text!r}: network=true needs Docker, and isolation=bubblewrap has no network"
        )
    refused = [f"{task.id} ({task.recipe.refused[0]})" for task in tasks if task.recipe.refused]
    if refused and not ignore_dockerfile:
        more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        raise TaskEnvironmentError(
            f"{line.text!r}: {DOCKERFILE} of {', '.join(refused[:_NAMED])}{more} needs Docker: start its "
            "engine (isolation=docker says why none answers), or leave such lines out with "
            "ignore_dockerfile=true, if this machine has what they install"
        )
    return BubblewrapSandboxes()


class DockerSandboxes:
    """Containers of the images of tasks, each a machine of its own, as Harbor runs them."""

    def __init__(self, *, network: bool) -> None:
        self._network = network
        self._images = DockerImages()
        self._isolation = IsolationOnFirstUse("docker")

    async def start(self, task: HarborTask) -> Sandbox:
        if task.image:
            image = await self._images.named(task.image, timeout_s=task.build_timeout_s)
        else:
            image = await self._images.built(
                task.folder / "environment", name=task.id, timeout_s=task.build_timeout_s
            )
        return await self._isolation.start(
            SandboxSpec(
                image=image.name,
                workdir=task.workdir or image.workdir,
                environment=task.environment,
                limits=_limits(task),
                as_machine=True,
                network=self._network and task.may_have_network,
            )
        )

    async def close(self) -> None:
        await self._images.close()
        await self._isolation.close()


class BubblewrapSandboxes:
    """Sandboxes with the programs of this machine, and the files that a Dockerfile copies."""

    def __init__(self) -> None:
        self._isolation = IsolationOnFirstUse("bubblewrap")
        self._preparing = asyncio.Lock()
        self._folders: tempfile.TemporaryDirectory[str] | None = None

    async def start(self, task: HarborTask) -> Sandbox:
        return await self._isolation.start(
            SandboxSpec(
                folder=await self._folder(task),
                workdir=task.recipe.workdir,
                environment=task.recipe.environment,
                limits=_limits(task),
            )
        )

    async def close(self) -> None:
        await self._isolation.close()
        if self._folders is not None:
            await asyncio.to_thread(self._folders.cleanup)

    async def _folder(self, task: HarborTask) -> Path:
        """Return the working folder of a task, made once and kept: running sandboxes may mount it."""
        async with self._preparing:
            if self._folders is None:
                self._folders = tempfile.TemporaryDirectory(prefix="areal-agents-harbor-")
            folder = Path(self._folders.name) / task.id
            if not folder.exists():
                # A new name each time: the thread of a cancelled episode may still copy into an earlier one.
                unfinished = Path(tempfile.mkdtemp(prefix=f"{task.id}.", dir=self._folders.name))
                await asyncio.to_thread(task.recipe.copy_into, unfinished)
                unfinished.rename(folder)
            return folder


def _limits(task: HarborTask) -> Limits:
    limits = Limits()
    if task.memory_mb is not None:
        limits = replace(limits, memory_mb=task.memory_mb)
    if task.cpus is not None:
        limits = replace(limits, cpus=task.cpus)
    return limits
