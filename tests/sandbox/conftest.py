from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from areal_agents.sandbox.isolations import open_isolation
from areal_agents.sandbox.remote.client import RemoteIsolation
from areal_agents.sandbox.remote.host import SandboxHost
from areal_agents.sandbox.remote.hosts import HostAddress, SandboxHosts
from areal_agents.sandbox.sandbox import Finished, Isolation, Limits, SandboxSpec
from areal_agents.sockets import listen, url_of
from areal_agents.tls import TlsConfig

# The limits are small, so that what escapes from one of them does not harm the machine.
LIMITS = Limits(memory_mb=256, processes=64, disk_mb=64)
IMAGE = os.environ.get("AREAL_AGENTS_TEST_IMAGE", "python:3.11-slim")


def needs(isolation: str) -> None:
    """Skip a test whose isolation this machine does not have."""
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed; make sandbox-tools installs it")
    if isolation == "docker" and not has_engine():
        pytest.skip("no Docker engine answers; make test-docker starts one for its tests")


def spec_for(isolation: str, **fields: object) -> SandboxSpec:
    """Return a spec with the small limits, and with an image if the isolation needs one."""
    image = {"image": IMAGE} if isolation == "docker" else {}
    return SandboxSpec(**{"limits": LIMITS, **image, **fields})


@pytest.fixture(params=["process", "bubblewrap", "docker"])
def isolation_name(request: pytest.FixtureRequest) -> str:
    needs(request.param)
    return request.param


@pytest.fixture(
    params=[
        *("process", "bubblewrap", "docker", "process on a host"),
        pytest.param("bubblewrap on a host", marks=pytest.mark.slow),
    ]
)
async def isolation(request: pytest.FixtureRequest) -> AsyncIterator[Isolation]:
    name, _, where = request.param.partition(" ")
    needs(name)
    async with AsyncExitStack() as stack:
        opened: Isolation
        if where:
            address = await stack.enter_async_context(sandbox_host())
            opened = RemoteIsolation(name, SandboxHosts(lambda: [address]))
        else:
            opened = await open_isolation(name, spec_for(name))
        stack.push_async_callback(opened.close)
        yield opened


@asynccontextmanager
async def sandbox_host(
    *,
    places: int = 4,
    model_server: str | None = None,
    base: Path | None = None,
    warm: SandboxSpec | None = None,
    tls: TlsConfig | None = None,
) -> AsyncIterator[HostAddress]:
    """Serve sandboxes in this process, as a host of a run does.

    Args:
        warm: the spec from which two sandboxes are started in advance, in the isolation `process`.
    """
    host = SandboxHost("the token", places=places, model_server=model_server, base=base)
    try:
        if warm is not None:
            await host.warm_up("process", warm, warm=2)
        listener = listen("127.0.0.1", 0)
        await host.listen(listener, tls)
        yield HostAddress(url_of(listener, "http" if tls is None else "https"), "the token")
    finally:
        await host.close()


@pytest.fixture
async def bubblewrap() -> AsyncIterator[Isolation]:
    needs("bubblewrap")
    opened = await open_isolation("bubblewrap", spec_for("bubblewrap"))
    try:
        yield opened
    finally:
        await opened.close()


@functools.cache
def has_engine() -> bool:
    """Whether a Docker engine answers."""
    if shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "version"], capture_output=True, timeout=30).returncode == 0
    except subprocess.TimeoutExpired:
        return False


async def timed_out(
    run: Callable[[float], Awaitable[Finished]], has_begun: Callable[[Finished], bool]
) -> Finished:
    """Return the result of a command that its time limit ended after it had begun.

    The limit is short at first. If the command did not begin within it, a longer one is tried.

    Args:
        run: runs the command with a time limit in seconds.
        has_begun: whether the output shows that the command did what the test needs.
    """
    for timeout_s in (1, 5, 25, 60):
        done = await run(timeout_s)
        assert done.timed_out
        if has_begun(done):
            break
    return done
