"""The modes in which a program is the agent, and what the machine needs for each of them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from areal_agents.rollout.agents.jobs.queue import JobQueue
from areal_agents.sandbox.docker import LABEL
from tests.sandbox.conftest import IMAGE
from tests.sandbox.conftest import needs as needs_isolation

SLURM_TEMPLATE = Path(__file__).parents[2] / "examples/agent_jobs/agent.sbatch"
KUBERNETES_TEMPLATE = SLURM_TEMPLATE.with_name("agent-job.yaml")
DEFINITION = """
program = "python3"
install = "the Python of the tests"
least_version = "3.11"
dialect = "chat"
arguments = ["{script}"]
stdin = "{{prompt}}"

[environment]
OPENAI_BASE_URL = "{{base_url}}"
OPENAI_API_KEY = "{{key}}"
AREAL_AGENTS_EPISODE_ID = "{{episode}}"
"""


def command(script: Path, _folder: Path, *readable: Path, **sandbox: Any) -> dict[str, Any]:
    """A program as a command, in a sandbox if `sandbox` names an isolation."""
    python = "python3" if sandbox.get("isolation") == "docker" else sys.executable
    if sandbox and sandbox["isolation"] != "process":
        sandbox["readable"] = [str(path) for path in (script, *readable)]
    return {"command": shlex.join([python, str(script)]), **sandbox}


def command_line_agent(script: Path, folder: Path, *readable: Path, **sandbox: Any) -> dict[str, Any]:
    """A program that is described by a definition of the user."""
    definition = folder / "program.toml"
    definition.write_text(DEFINITION.format(script=script))
    if sandbox:
        sandbox["readable"] = [str(path) for path in (script, *readable)]
    python = "python3" if sandbox.get("isolation") == "docker" else sys.executable
    return {"cli": str(definition), "executable": python, "prompt": "{task}", **sandbox}


def slurm_job(script: Path, _folder: Path, *_readable: Path) -> dict[str, Any]:
    """A program as a batch job; the fixture `slurm_programs` provides the commands of Slurm."""
    job = {"kind": "slurm", "template": str(SLURM_TEMPLATE), "poll_s": 0.2}
    return {"command": shlex.join([sys.executable, str(script)]), "job": job}


def kubernetes_job(script: Path, _folder: Path, *_readable: Path) -> dict[str, Any]:
    """A program as a Job; the fixture `kubernetes_programs` provides kubectl."""
    job = {"kind": "kubernetes", "template": str(KUBERNETES_TEMPLATE), "poll_s": 0.2}
    return {"command": shlex.join([sys.executable, str(script)]), "job": job}


# For each mode, a function of the script, a folder for its files, and the other paths that it reads.
MODES_OF_PROGRAMS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "command": command,
    "cli": command_line_agent,
    "command as a Slurm job": slurm_job,
    "command as a Kubernetes Job": kubernetes_job,
    "command in process": partial(command, isolation="process"),
    "command in bubblewrap": partial(command, isolation="bubblewrap"),
    "cli in bubblewrap": partial(command_line_agent, isolation="bubblewrap"),
    "command in docker": partial(command, isolation="docker", image=IMAGE),
    "cli in docker": partial(command_line_agent, isolation="docker", image=IMAGE),
}


def needs(mode: str) -> None:
    """Skip a test whose mode this machine does not support."""
    if mode == "node" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    needs_isolation(mode.rpartition(" in ")[2])


def until_ended(queue: JobQueue, id: str) -> None:
    """Return when a job has ended."""
    deadline = time.monotonic() + 150.0
    while not (state := queue.states()[id]).has_ended:
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def containers() -> list[str]:
    """The containers of this process's sandboxes; none if Docker is not installed."""
    if shutil.which("docker") is None:
        return []
    form = '{{.Names}} {{.Label "' + LABEL + '"}}'
    listed = ["docker", "ps", "--all", "--filter", f"label={LABEL}", "--format", form]
    lines = subprocess.run(listed, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return [line for line in lines if f"-{os.getpid()}-" in line.partition(" ")[2]]
