"""Finds the program of a command-line agent, on this machine or in an image, and checks its version."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from areal_agents.errors import AgentError
from areal_agents.rollout.agents.cli.definition import CliDefinition
from areal_agents.rollout.agents.cli.prepare import clean_environment

VERSION_TIMEOUT_S = 60.0  # time limit of a command that prints a version
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_FOUND = 'command -v "$1" || { echo "the image has no program $1" >&2; exit 127; }; exec "$@" 2>&1'


def find_program(definition: CliDefinition, executable: str, inherited: Mapping[str, str]) -> Path:
    """Return the program of an agent.

    Args:
        executable: its path, or a name to look for; "": the name in the definition.
        inherited: the variables of this process.

    Raises:
        AgentError: there is none, it does not print a version, or its version is too old; the message has the
            command that installs it.
    """
    name = executable or definition.program
    found = shutil.which(name, path=inherited.get("PATH"))
    if found is None:
        where = "" if "/" in name else " on the PATH"
        raise AgentError(
            f"there is no program {name!r}{where}; install it with {definition.install!r}, or name it with "
            "executable"
        )
    program = Path(found).absolute()
    words = [str(program), *definition.version_arguments]
    with tempfile.TemporaryDirectory(prefix="areal-agents-version-", ignore_cleanup_errors=True) as home:
        printed = _printed_by(words, definition, clean_environment(inherited, Path(home)), home)
    _check_version(printed, str(program), definition)
    return program


def find_program_in_image(definition: CliDefinition, executable: str, image: str) -> Path:
    """Return the path of an agent's program inside an image, which the Docker engine must have.

    Raises:
        AgentError: docker, its engine or the image is missing, or for one of the reasons of `find_program`.
    """
    docker = shutil.which("docker")
    if docker is None:
        raise AgentError("isolation: docker needs the program docker; install Docker")
    name = executable or definition.program
    container = f"areal-agents-version-{secrets.token_hex(6)}"
    words = [docker, "run", "--rm", "--pull", "never", "--network", "none", "--name", container]
    words += ["--entrypoint", "/bin/sh", image, "-c", _FOUND, "sh", name, *definition.version_arguments]
    try:
        printed = _printed_by(words, definition, os.environ, None, shown=f"{name} in the image {image}")
    finally:
        # The container is left only after the time limit; an engine that does not answer cannot remove it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            removal = [docker, "rm", "--force", container]
            subprocess.run(removal, capture_output=True, timeout=VERSION_TIMEOUT_S)
    program, _, version = printed.partition("\n")
    _check_version(version, f"{program} in the image {image}", definition)
    return Path(program)


def _printed_by(
    words: list[str],
    definition: CliDefinition,
    environment: Mapping[str, str],
    cwd: str | None,
    *,
    shown: str = "",
) -> str:
    """Return the output of a command that prints a version. Raises AgentError if it fails or prints none."""
    shown = shown or " ".join(words)
    try:
        done = subprocess.run(
            words,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AgentError(f"{shown} cannot be started: {error}") from error
    printed = done.stdout if _VERSION.search(done.stdout) else done.stdout + done.stderr
    if done.returncode or not _VERSION.search(printed):
        raise AgentError(
            f"{shown} printed no version (exit status {done.returncode}): "
            f"{(done.stderr or done.stdout).strip()[-500:]}; install it with {definition.install!r}"
        )
    return printed


def _check_version(printed: str, program: str, definition: CliDefinition) -> None:
    """Raise AgentError unless the first version in `printed` is new enough for the definition."""
    found = _VERSION.search(printed)
    if found is None or _numbers(found[0]) < _numbers(definition.least_version):
        raise AgentError(
            f"{program} has version {found[0] if found else 'none'}, and its definition requires "
            f"{definition.least_version} or newer; install it with {definition.install!r}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))
