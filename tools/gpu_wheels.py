"""Downloads what a GPU machine without network lacks: `python tools/gpu_wheels.py FOLDER [PIP_LIST]`.

PIP_LIST is a file that `python3 -m pip list --format=freeze` wrote there; what it contains in a version that
serves is left out. Without it everything is downloaded except torch and the libraries of CUDA, some 500 MB.
The versions are those of the environment in which this runs; the machine is x86-64 Linux with Python 3.12.
There, `make test-gpu PYTHON=python3 WHEELS=FOLDER` unpacks them into a folder of the checkout.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

NEEDED = (
    "areal-agents[train,examples]",
    "hypothesis",
    "liger-kernel",
    "psutil",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
)
# An environment without them is no GPU machine, and they are too large to carry.
OF_CUDA = re.compile(r"torch|triton|(nvidia|cuda)-.*")
ENVIRONMENT = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
GLIBC = range(39, 16, -1)  # manylinux_2_N, which pip matches exactly
DOWNLOAD_S = 1200


def main(folder: Path, pip_list: Path | None) -> None:
    """Download the wheels into the folder."""
    wanted = missing(read_list(pip_list.read_text()) if pip_list else {})
    if not wanted:
        print("nothing is missing")
        return
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms,
            "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", "--dest", str(folder),
            *(f"{name}=={version}" for name, version in sorted(wanted.items())),
        ],
        check=True, timeout=DOWNLOAD_S,
    )  # fmt: skip
    size = sum(file.stat().st_size for file in folder.glob("*.whl"))
    print(f"{len(wanted)} wheels, {size / 1e6:.0f} MB, are in {folder}")


def read_list(text: str) -> dict[str, Version | None]:
    """Read lines `name==version` or `name`; None is a version that is not known, and taken to serve."""
    found: dict[str, Version | None] = {}
    for line in text.split():
        name, _, version = line.partition("==")
        found[canonicalize_name(name)] = Version(version) if version else None
    return found


def missing(there: Mapping[str, Version | None]) -> dict[str, str]:
    """Return the versions of all packages that are needed, directly or not, and are not there."""
    wanted: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [Requirement(text) for text in NEEDED]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        serves = name in there and _serves(there[name], requirement)
        if not serves and not OF_CUDA.fullmatch(name) and name != "areal-agents":
            wanted[name] = importlib.metadata.version(name)
        # what is there brought its own requirements with it
        if key in seen or serves or OF_CUDA.fullmatch(name):
            continue
        seen.add(key)
        queue += _required(name, requirement.extras)
    return wanted


def _serves(version: Version | None, requirement: Requirement) -> bool:
    return version is None or requirement.specifier.contains(version, prereleases=True)


def _required(name: str, extras: set[str]) -> Iterator[Requirement]:
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**ENVIRONMENT, "extra": e}) for e in ("", *extras)):
            yield requirement


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
