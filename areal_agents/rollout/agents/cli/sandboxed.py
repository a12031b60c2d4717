"""Runs the program of a command-line agent in a sandbox of its own, and copies out what it left."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import logging
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from areal_agents.episode import Episode
from areal_agents.errors import AgentError, SandboxError
from areal_agents.rollout.agents.cli.prepare import Launch
from areal_agents.sandbox.isolations import open_isolation
from areal_agents.sandbox.sandbox import Finished, Isolation, Sandbox, SandboxSpec

logger = logging.getLogger(__name__)

MOST_LEFT = 1 << 26  # bytes that are copied out
_COPY_S = 60.0  # time limit in seconds of each command besides the program
_TAIL = 4096  # bytes of each output stream that are kept


class SandboxedPrograms:
    """Runs programs in sandboxes of one isolation, which is opened at the first of them."""

    def __init__(self, isolation: str) -> None:
        self._name = isolation
        self._opening = asyncio.Lock()
        self._isolation: Isolation | None = None

    async def run(
        self,
        program: Path,
        launch: Callable[[Episode, Path, Path], Launch],
        ep: Episode,
        spec: SandboxSpec,
        *,
        left: Path,
        log: BinaryIO | None,
    ) -> Finished:
        """Run a program to its end, and copy what is then in its working folder.

        Args:
            launch: says how it is started, from the episode as the sandbox reaches it, the home folder and
                the working folder.
            left: the folder to which the working folder is copied, also if the program is cancelled.

        Raises:
            AgentError: the sandbox cannot be started or has ended, or the folder is too large.
        """
        try:
            sandbox = await (await self._opened(spec)).start(spec)
            try:
                inner = dataclasses.replace(ep, base_url=sandbox.inner_url(ep.base_url))
                home = await _home_of(sandbox)
                how = launch(inner, home, Path(sandbox.workdir))
                for name, text in how.files.items():
                    await sandbox.write(str(home / name), text.encode())
                try:
                    finished = await sandbox.run(
                        [str(program), *how.arguments],
                        timeout_s=None,  # the time limit of the episode cancels it
                        environment=how.environment,
                        stdin=how.stdin.encode(),
                        kept_bytes=_TAIL,
                        model_url=ep.base_url,
                        log=log,
                    )
                except asyncio.CancelledError:
                    try:
                        await _copy_out(sandbox, left)
                    except SandboxError as error:  # must not take the place of the cancellation
                        logger.warning("episode %s: %s", ep.id, error)
                    raise
                await _copy_out(sandbox, left)
                return finished
            finally:
                await sandbox.end()
        except SandboxError as error:
            raise AgentError(f"the agent's sandbox: {error}") from error

    async def close(self) -> None:
        """End the isolation with all its sandboxes."""
        if self._isolation is not None:
            await self._isolation.close()
            self._isolation = None

    async def _opened(self, spec: SandboxSpec) -> Isolation:
        async with self._opening:
            if self._isolation is None:
                self._isolation = await open_isolation(self._name, spec)
            return self._isolation


async def _home_of(sandbox: Sandbox) -> Path:
    """Return the home folder, with the folders that `clean_environment` names."""
    command = 'mkdir -p "$HOME/tmp" "$HOME/.cache" "$HOME/.config" "$HOME/.local/share" "$HOME/.local/state"'
    done = await sandbox.run(["/bin/sh", "-c", f'{command} && printf %s "$HOME"'], timeout_s=_COPY_S)
    if done.status != 0:
        raise SandboxError(f"there is no home folder: {done.stderr.text().strip()}")
    return Path(done.stdout.text())


async def _copy_out(sandbox: Sandbox, left: Path) -> None:
    """Copy the working folder; links that lead out of it are refused, as tarfile's filter "data" does."""
    done = await sandbox.run(["/bin/sh", "-c", "tar -c -f - ."], timeout_s=_COPY_S, kept_bytes=MOST_LEFT)
    if done.status != 0 or done.stdout.is_cut:
        why = f"it has more than {MOST_LEFT >> 20} MiB" if done.stdout.is_cut else done.stderr.text().strip()
        raise SandboxError(f"what the agent left cannot be copied: {why}")
    await asyncio.to_thread(_extract, done.stdout.kept, left)


def _extract(archive: bytes, left: Path) -> None:
    left.mkdir(exist_ok=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(left, filter="data")
    except tarfile.TarError as error:
        raise SandboxError(f"what the agent left cannot be copied: {error}") from error
