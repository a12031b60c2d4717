"""The launcher for Ray without a cluster; tests/cluster/test_ray.py has the tests with one."""

from __future__ import annotations

import sys

import pytest

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.ray.config import RayConfig
from areal_agents.cluster.launchers.ray.launcher import RayLauncher
from areal_agents.errors import ConfigError


def test_the_command_reserves_the_resources_of_the_process_and_runs_it_unchanged() -> None:
    process = RoleProcess("engine", 1, ("program", "--index", "1", "--", "x"), gpus=2, cpus=8)
    command = RayLauncher(RayConfig(address="10.0.0.1:6379", wait_s=90)).command(process)
    assert command[:3] == (sys.executable, "-m", "areal_agents.cluster.launchers.ray.driver")
    assert command[3:] == (
        *("--address=10.0.0.1:6379", "--name=engine-1", "--gpus=2", "--cpus=8", "--wait-s=90"),
        *("--", "program", "--index", "1", "--", "x"),
    )
    assert not any(part.startswith("--address") for part in RayLauncher(RayConfig()).command(process))


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--launcher ray needs ray.*pip install 'areal-agents\[ray\]'"):
        RayLauncher(RayConfig()).check()
