from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator

import pytest

from areal_agents.sandbox.isolations import open_isolation
from areal_agents.sandbox.sandbox import Isolation, Limits, SandboxSpec

# Small limits: what escapes from them must not harm the machine that runs the tests.
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


@pytest.fixture
async def isolation(isolation_name: str) -> AsyncIterator[Isolation]:
    opened = await open_isolation(isolation_name, spec_for(isolation_name))
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture
async def bubblewrap() -> AsyncIterator[Isolation]:
    needs("bubblewrap")
    opened = await open_isolation("bubblewrap", spec_for("bubblewrap"))
    try:
        yield opened
    finally:
        await opened.close()


def has_engine() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, timeout=30).returncode == 0
