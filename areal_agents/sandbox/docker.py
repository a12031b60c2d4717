"""The isolation `docker`: a container for each sandbox, driven by the docker command line.

The container's first process only waits, so that commands are run by `docker exec`; what a command leaves
running is killed afterwards. It ends with this process, and the container with it. The container has no
network. The model is reached through a unix socket in a shared folder, which a small Python program in the
container forwards from its loopback interface; so an image for agents needs python3 and sh, and one for
graders sh.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from areal_agents.errors import SandboxError, SandboxUnavailable
from areal_agents.sandbox.docker_client import WAIT, AttachedContainer, call, docker
from areal_agents.sandbox.files import read_file, write_file
from areal_agents.sandbox.output import Log
from areal_agents.sandbox.relay import MODEL_PORT, MOST_CONNECTIONS, Relay, relayed_url
from areal_agents.sandbox.sandbox import KEPT_OUTPUT, Finished, Mount, SandboxSpec
from areal_agents.sandbox.variables import named_back, renamed

WORKDIR = "/workspace"
LABEL = "areal-agents.owner"  # of every container; its value is the owner's pid namespace, pid and start time
_SOCKETS = "/run/areal-agents"  # folder of the relay's socket inside
_KILL_ALL = "kill -9 -1 2>/dev/null; exit 0"  # kill fails where nothing is left
# Forwards 127.0.0.1:MODEL_PORT to the unix socket; makes a file when it listens. It has one thread, because
# the threads of a container are limited, and a flood of connections must not end it.
_FORWARD = f"""
import asyncio
places = asyncio.Semaphore({MOST_CONNECTIONS - 1})
async def copy(reader, writer):
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError: pass
async def both(reader, writer):
    async with places:
        far_reader, far_writer = await asyncio.open_unix_connection("{_SOCKETS}/model")
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        far_writer.transport.abort()
        writer.close()
async def main():
    server = await asyncio.start_server(both, "127.0.0.1", {MODEL_PORT}, backlog=512)
    open("/tmp/.areal-agents-ready", "w").close()
    await server.serve_forever()
asyncio.run(main())
"""
_ALONE = 'exec "$@"'
_WITH_FORWARDER = (
    'command -v python3 >/dev/null || { echo "an image for agents needs python3" >&2; exit 127; }; '
    'rm -f /tmp/.areal-agents-ready; python3 -c "$AREAL_AGENTS_FORWARD" </dev/null >/dev/null 2>&1 & '
    "n=0; until [ -e /tmp/.areal-agents-ready ] || [ $n -ge 200 ]; do sleep 0.05; n=$((n+1)); done; "
    '[ -e /tmp/.areal-agents-ready ] || { echo "nothing forwards to the model after 10 s" >&2; exit 126; }; '
    'unset AREAL_AGENTS_FORWARD; exec "$@"'
)


def start_arguments(spec: SandboxSpec, *, name: str, owner: str, sockets: Path) -> list[str]:
    """Return the arguments of docker that start the container of a sandbox."""
    limits, workdir = spec.limits, spec.workdir or WORKDIR
    words = ["run", "--interactive", "--rm", "--name", name, "--label", f"{LABEL}={owner}"]
    words += ["--security-opt", "no-new-privileges", "--hostname", "sandbox", "--entrypoint", "/bin/sh"]
    if not spec.network:
        words += ["--network", "none"]
    if limits.memory_mb is not None:
        words += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    if limits.processes is not None:
        words += ["--pids-limit", str(limits.processes)]
    if limits.cpus is not None:
        words += ["--cpus", f"{limits.cpus:g}"]
    words += ["--workdir", workdir]
    words += ["--user", "0:0"] if spec.as_machine else _confined(spec, workdir)
    words += ["--mount", f"type=bind,source={sockets},target={_SOCKETS},readonly"]
    for readable in spec.readable:
        words += ["--mount", f"type=bind,source={readable.resolve()},target={readable.absolute()},readonly"]
    return [*words, spec.image, "-c", WAIT]


def _confined(spec: SandboxSpec, workdir: str) -> list[str]:
    """Return the arguments for a user without capabilities, who writes to folders in memory only."""
    words = ["--read-only", "--cap-drop", "ALL", "--user", f"{spec.user}:{spec.user}"]
    size = f",size={spec.limits.disk_mb}m" if spec.limits.disk_mb is not None else ""
    # A folder that the image has, or that --workdir makes, keeps its mode, so the user must be its owner.
    owned = f"mode=1777,uid={spec.user},gid={spec.user}"
    for path in dict.fromkeys((workdir, "/tmp", "/home/agent", *spec.writable)):
        words += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,{owned}{size}"]
    return [*words, "--env", "HOME=/home/agent"]


def run_arguments(
    name: str, argv: Sequence[str], variables: Sequence[str], *, workdir: str, forwards: bool
) -> list[str]:
    """Return the arguments of docker that run a command.

    Variables are named and not given: docker takes their values from its environment, so that no key is in
    the arguments, which every user of the machine can read. A shell executes the command, because what docker
    itself says of a program that it cannot find is on standard output. The variables pass as `renamed`.
    """
    words = ["exec", "--interactive", "--workdir", workdir]
    for variable in renamed(dict.fromkeys(variables, "")):
        words += ["--env", variable]
    script = named_back(variables) + (_WITH_FORWARDER if forwards else _ALONE)
    return [*words, name, "/bin/sh", "-c", script, "run", *argv]


def check_image_name(name: str) -> None:
    """Raise SandboxError if docker would read the name of an image as an option."""
    if name.startswith("-"):
        raise SandboxError(f"an image cannot be called {name!r}: its name begins with a letter or a digit")


class DockerIsolation:
    """Starts containers; see `Isolation`."""

    name = "docker"

    def __init__(self, program: str) -> None:
        self._program = program
        self._owner = f"{_machine()}-{os.getpid()}-{_started_at(os.getpid())}"
        self._sandboxes: set[DockerSandbox] = set()

    @classmethod
    async def open(cls) -> DockerIsolation:
        """Find docker, and remove the containers of dead owners.

        Raises:
            SandboxUnavailable: docker is not installed, or its engine does not answer.
        """
        program = shutil.which("docker")
        if program is None:
            raise SandboxUnavailable(
                "isolation: docker needs the program docker; install Docker, or set isolation: none"
            )
        isolation = cls(program)
        try:
            await docker(program, ["version", "--format", "{{.Server.Version}}"])
        except SandboxError as error:
            raise SandboxUnavailable(
                f"isolation: docker: {error}; start the engine, or set isolation: none"
            ) from error
        await isolation._remove_leftovers()
        return isolation

    async def start(self, spec: SandboxSpec) -> DockerSandbox:
        """Start a container. Raises SandboxError if it cannot be."""
        if not spec.image:
            raise SandboxError("isolation: docker needs image, the name of an image")
        check_image_name(spec.image)
        name = f"areal-agents-{secrets.token_hex(6)}"
        sockets = Path(tempfile.mkdtemp(prefix="areal-agents-docker-"))
        sockets.chmod(0o755)
        sandbox = DockerSandbox(self._program, name, spec, sockets, self._sandboxes.discard)
        self._sandboxes.add(sandbox)
        words = start_arguments(spec, name=name, owner=self._owner, sockets=sockets)
        starting = asyncio.ensure_future(AttachedContainer.start(self._program, words))
        try:
            try:
                sandbox.container = await asyncio.shield(starting)
            except asyncio.CancelledError:
                # A docker that is killed may have asked for a container that begins after its removal.
                await asyncio.wait({starting})
                if starting.exception() is None:
                    sandbox.container = starting.result()
                raise
            if spec.folder is not None:
                await sandbox.put(spec.folder, spec.workdir or WORKDIR)
        except BaseException:
            await sandbox.end()
            raise
        return sandbox

    async def close(self) -> None:
        """End every container."""
        await asyncio.gather(*(sandbox.end() for sandbox in list(self._sandboxes)))

    async def _remove_leftovers(self) -> None:
        listed = await docker(
            self._program,
            [
                "ps",
                "--all",
                "--filter",
                f"label={LABEL}",
                "--format",
                '{{.Names}} {{.Label "' + LABEL + '"}}',
            ],
        )
        for line in listed.decode().splitlines():
            name, owner = line.split()
            machine, pid, started = owner.split("-")
            if machine == _machine() and _started_at(int(pid)) != started:
                await docker(self._program, ["rm", "--force", name])


class DockerSandbox:
    """See `Sandbox`."""

    def __init__(
        self,
        program: str,
        name: str,
        spec: SandboxSpec,
        sockets: Path,
        ended: Callable[[DockerSandbox], None],
    ) -> None:
        self._program = program
        self._name = name
        self._spec = spec
        self._sockets = sockets
        self._ended = ended
        self.container: AttachedContainer | None = None
        self._is_ended = False
        self._busy = asyncio.Lock()

    @property
    def workdir(self) -> str:
        return self._spec.workdir or WORKDIR

    def inner_url(self, url: str) -> str:
        return relayed_url(url)

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
        variables = {**self._spec.environment, **(environment or {})}
        if model_url is not None:
            variables["AREAL_AGENTS_FORWARD"] = _FORWARD
        words = run_arguments(
            self._name, argv, list(variables), workdir=self.workdir, forwards=model_url is not None
        )
        async with self._busy, contextlib.AsyncExitStack() as stack:
            if self._is_ended:
                raise SandboxError("the sandbox has ended")
            if model_url is not None:
                await self._listen(model_url, stack)
            for mount in mounts:
                await self._copy_in(mount)
            try:
                ended = await call(
                    self._program, words, {**os.environ, **renamed(variables)}, stdin, timeout_s, kept_bytes,
                    Log(log) if log is not None else None, streams,
                )  # fmt: skip
            finally:
                all_killed = await self._kill_all()
            if not all_killed:
                raise SandboxError(
                    "what the command left running could not be killed; its container is removed"
                )
            for mount in mounts:
                await self._copy_out(mount)
        return Finished(ended.status, ended.stdout.output(), ended.stderr.output(), ended.timed_out)

    async def put(self, folder: Path, inside: str) -> None:
        """Copy the content of a folder of this machine into one of the container."""
        # `docker cp` does not reach a tmpfs, so that a tar stream is unpacked by a command.
        archive = await asyncio.to_thread(_archive, folder)
        argv = ["exec", "--interactive", self._name, "tar", "-x", "-f", "-", "-C", inside]
        await docker(self._program, argv, stdin=archive)

    async def read(self, path: str, *, most_bytes: int = 1 << 20) -> bytes:
        return await read_file(self, path, most_bytes=most_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await write_file(self, path, data)

    async def end(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        await docker(self._program, ["rm", "--force", self._name], may_fail=True)
        if self.container is not None:
            await self.container.end()
        shutil.rmtree(self._sockets)
        self._ended(self)

    async def _kill_all(self) -> bool:
        """Kill what a command left running; if that cannot be done, end the container with it."""
        try:
            await docker(self._program, ["exec", self._name, "/bin/sh", "-c", _KILL_ALL])
        except SandboxError:
            await self.end()
            return False
        return True

    async def _listen(self, model_url: str, stack: contextlib.AsyncExitStack) -> None:
        path = self._sockets / "model"
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o666)  # the container's user is another one; the folder is shown to this container only
        listener.listen(128)
        relay = Relay(model_url)
        await relay.start(listener)
        stack.callback(path.unlink)
        stack.push_async_callback(relay.close)

    async def _copy_in(self, mount: Mount) -> None:
        """Make a folder anew, with the content of a mount: what the agent left there is gone."""
        clear = 'rm -rf -- "$1"/* "$1"/.[!.]* 2>/dev/null; mkdir -p -- "$1"'
        await docker(self._program, ["exec", self._name, "/bin/sh", "-c", clear, "clear", mount.inside])
        await self.put(mount.host, mount.inside)

    async def _copy_out(self, mount: Mount) -> None:
        if mount.is_writable:
            argv = ["exec", self._name, "tar", "-c", "-f", "-", "-C", mount.inside, "."]
            await asyncio.to_thread(_unpack, await docker(self._program, argv), mount.host)


def _archive(folder: Path) -> bytes:
    """Return a folder as a tar archive whose files belong to whoever unpacks it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(folder, arcname=".")
    return data.getvalue()


def _unpack(data: bytes, folder: Path) -> None:
    """Unpack an archive that a container made; no member can lie outside the folder."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")


def _machine() -> str:
    """Return what tells this pid namespace from others that use the same engine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return boot + os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]")


def _started_at(pid: int) -> str:
    """Return when a process started, in ticks since the boot, which tells it from a later one; "": none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
