"""Finds the program of a command-line agent, and checks its version."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from areal_agents.errors import AgentError
from areal_agents.rollout.agents.cli.prepare import clean_environment
from areal_agents.rollout.agents.cli.seam import Seam

VERSION_TIMEOUT_S = 60.0
_VERSION = re.compile(r"\d+(?:\.\d+)+")


def find_program(seam: Seam, executable: str, inherited: Mapping[str, str]) -> Path:
    """Return the program of a seam.

    Args:
        executable: its path, or a name to look for; "": the seam's own.
        inherited: the variables of this process.

    Raises:
        AgentError: there is none, it does not print a version, or its version is too old; the message has the
            command that installs it.
    """
    name = executable or seam.program
    found = shutil.which(name, path=inherited.get("PATH"))
    if found is None:
        where = "" if "/" in name else " on the PATH"
        raise AgentError(
            f"there is no program {name!r}{where}; install it with {seam.install!r}, or name it with "
            "executable"
        )
    program = Path(found).absolute()
    version = _version_of(program, seam, inherited)
    if _numbers(version) < _numbers(seam.least_version):
        raise AgentError(
            f"{program} has version {version}, and the seam needs {seam.least_version} or newer; install it "
            f"with {seam.install!r}"
        )
    return program


def _version_of(program: Path, seam: Seam, inherited: Mapping[str, str]) -> str:
    """Return the version that a program prints, in a home folder that is thrown away."""
    words = [str(program), *seam.version_arguments]
    with tempfile.TemporaryDirectory(prefix="areal-agents-version-", ignore_cleanup_errors=True) as home:
        try:
            done = subprocess.run(
                words,
                env=clean_environment(inherited, Path(home)),
                cwd=home,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=VERSION_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AgentError(f"{program} cannot be started: {error}") from error
    version = _VERSION.search(done.stdout) or _VERSION.search(done.stderr)
    if done.returncode or version is None:
        raise AgentError(
            f"{' '.join(words)} printed no version (exit status {done.returncode}): "
            f"{(done.stderr or done.stdout).strip()[-500:]}; install it with {seam.install!r}"
        )
    return version[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))
