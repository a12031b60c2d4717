"""Reads task folders of Harbor: `task.toml`, `instruction.md`, `environment/Dockerfile` and `tests/test.sh`.

A Dockerfile that only names a base image, copies files and sets variables and the working folder can be
followed without Docker; any other line is named as the reason why not.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from areal_agents.errors import TaskEnvironmentError

AGENT_TIMEOUT_S = 1800.0  # of a task that names none
VERIFIER_TIMEOUT_S = 600.0
BUILD_TIMEOUT_S = 600.0
DOCKERFILE = "environment/Dockerfile"

_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The part of a Dockerfile that can be followed without Docker.

    Attributes:
        workdir: the working folder inside.
        environment: variables of every command.
        copies: what is copied to which path inside, in order.
        refused: what cannot be followed: lines with their numbers, or the image that the task names.
    """

    workdir: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[tuple[Path, str], ...] = ()
    refused: tuple[str, ...] = ()

    def copy_into(self, folder: Path) -> None:
        """Copy what belongs into the working folder to a folder of this machine."""
        for source, inside in self.copies:
            target = folder / PurePosixPath(inside).relative_to(self.workdir)
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task of Harbor.

    Attributes:
        folder: its folder; its name is the task's id.
        instruction: what the agent reads.
        agent_timeout_s, verifier_timeout_s: time limits of the agent and of the tests, in seconds.
        verifier_environment: variables of the tests.
        memory_mb, cpus: limits of its sandbox, in MiB and in processors; None: the task names none.
        recipe: the part of its Dockerfile that can be followed without Docker.
        image: the image that the task names, which replaces its Dockerfile; "": none.
        workdir: the working folder that the task names; "": the image's.
        environment: the variables that the task sets for every command.
        build_timeout_s: time limit of building or pulling the image, in seconds.
        may_have_network: whether the task allows its agent and its tests any network.
    """

    folder: Path
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float
    verifier_environment: Mapping[str, str]
    memory_mb: int | None
    cpus: float | None
    recipe: Recipe
    image: str
    workdir: str
    environment: Mapping[str, str]
    build_timeout_s: float
    may_have_network: bool

    @property
    def id(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """Read a folder. Raises TaskEnvironmentError if it is incomplete, or needs what is not supported."""
        for name in ("task.toml", "instruction.md", "environment", DOCKERFILE, "tests"):
            if not (folder / name).resolve().is_relative_to(folder.resolve()):  # its files would be shown
                raise TaskEnvironmentError(f"the task {folder}: {name} is a link to outside of the folder")
        try:
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise TaskEnvironmentError(f"the task {folder} cannot be read: {error}") from error
        if not (folder / "tests" / "test.sh").is_file():
            raise TaskEnvironmentError(f"the task {folder} has no tests/test.sh")
        if unsupported := sorted(_unsupported(folder, settings)):
            raise TaskEnvironmentError(
                f"the task {folder} has {', '.join(unsupported)}, which is not supported"
            )
        environment, verifier = (_table(folder, settings, name) for name in ("environment", "verifier"))
        agent = _table(folder, settings, "agent")
        memory_mb = _number(folder, environment, "memory_mb")
        return cls(
            folder=folder,
            instruction=instruction,
            agent_timeout_s=_number(folder, agent, "timeout_sec") or AGENT_TIMEOUT_S,
            verifier_timeout_s=_number(folder, verifier, "timeout_sec") or VERIFIER_TIMEOUT_S,
            verifier_environment=_variables(folder, verifier),
            memory_mb=math.ceil(memory_mb) if memory_mb is not None else None,
            cpus=_number(folder, environment, "cpus"),
            recipe=_followed(folder, environment),
            image=str(environment.get("docker_image") or ""),
            workdir=str(environment.get("workdir") or ""),
            environment=_variables(folder, environment),
            build_timeout_s=_number(folder, environment, "build_timeout_sec") or BUILD_TIMEOUT_S,
            may_have_network=_may_have_network(environment, agent, verifier),
        )


def task_folders(path: Path) -> list[Path]:
    """Return a task's own folder, or those of the tasks in a folder, by name.

    Raises:
        TaskEnvironmentError: there is none.
    """
    if (path / "task.toml").is_file():
        return [path]
    found = sorted(file.parent for file in path.glob("*/task.toml"))
    if not found:
        raise TaskEnvironmentError(f"there is no task.toml in {path}, nor in a folder in it")
    return found


def _unsupported(folder: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a task has that an episode of one instruction and one sandbox cannot give it."""
    if settings.get("steps"):
        yield "steps"
    environment, verifier, agent = (
        _table(folder, settings, name) for name in ("environment", "verifier", "agent")
    )
    for name in ("mcp_servers", "healthcheck", "gpus", "tpu", "skills_dir"):
        if environment.get(name):
            yield f"environment.{name}"
    if environment.get("os", "linux") != "linux":
        yield f"environment.os {environment['os']}"
    for name in ("environment", "collect"):
        if verifier.get(name):
            yield f"verifier.{name}"
    for name, table in (("environment", environment), ("verifier", verifier)):
        if any("${" in str(value) for value in _table(folder, table, "env").values()):
            yield f"variables of this machine in {name}.env"
    for name, table in (("agent", agent), ("verifier", verifier)):
        if table.get("user"):
            yield f"{name}.user"
    if list((folder / "environment").glob("docker-compose.y*ml")):
        yield "a docker-compose file"


def _may_have_network(environment: Mapping[str, Any], *phases: Mapping[str, Any]) -> bool:
    """Return whether neither the task nor a phase of it restricts the network."""
    return environment.get("allow_internet", True) is not False and all(
        table.get("network_mode", "public") == "public" for table in (environment, *phases)
    )


def _table(folder: Path, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of the settings, {} if they lack it. Raises TaskEnvironmentError if it is no table."""
    table = settings.get(name, {})
    if not isinstance(table, Mapping):
        raise TaskEnvironmentError(f"the task {folder}: {name} must be a table, got {table!r}")
    return table


def _variables(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables in the table `env`."""
    return {name: str(value) for name, value in _table(folder, settings, "env").items()}


def _number(folder: Path, table: Mapping[str, Any], name: str) -> float | None:
    """Return a number above 0; None if the table lacks it. Raises TaskEnvironmentError for another value."""
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise TaskEnvironmentError(f"the task {folder}: {name} must be a number above 0, got {value!r}")
    return float(value)


def _followed(folder: Path, settings: Mapping[str, Any]) -> Recipe:
    """Follow the Dockerfile of a task as far as that is possible without Docker."""
    variables = _variables(folder, settings)
    file = folder / DOCKERFILE
    if image := settings.get("docker_image"):
        refused = (f"its image is {image}",)
        return Recipe(settings.get("workdir") or "/workspace", variables, refused=refused)
    if not file.is_file():
        return Recipe(settings.get("workdir") or "/workspace", variables)
    workdir, copies, not_followed = "/", [], []
    stages = 0
    from_dockerfile: dict[str, str] = {}
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskEnvironmentError(f"the task {folder}: {DOCKERFILE} cannot be read: {error}") from error
    for number, line in _instructions(text):
        instruction, _, rest = line.partition(" ")
        rest = _filled(rest.strip(), from_dockerfile)
        match instruction.upper():
            case "FROM" if not stages:
                stages += 1
            case "WORKDIR" if rest.isprintable() and "$" not in rest:
                workdir = str(PurePosixPath(workdir) / rest)
            case "ENV" if (pairs := _pairs(rest)) is not None:
                from_dockerfile |= pairs
            case "COPY" | "ADD" if (found := _copied(folder, rest, workdir)) is not None:
                copies += found
            case _:
                not_followed.append(f"line {number}: {line[:100]}")
    workdir = settings.get("workdir") or workdir
    if workdir == "/":
        not_followed.append(f"no WORKDIR in {file.name}: the whole file system would be the working folder")
        workdir = "/workspace"
    for source, inside in copies:
        if not PurePosixPath(inside).is_relative_to(workdir):
            not_followed.append(f"{source.name} is copied to {inside}, outside of the WORKDIR {workdir}")
    within = tuple(copy for copy in copies if PurePosixPath(copy[1]).is_relative_to(workdir))
    return Recipe(workdir, {**from_dockerfile, **variables}, within, tuple(not_followed))


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Replace the known variables in a string by their values."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[0]), text)


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Yield the instructions of a Dockerfile with the number of their first line."""
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#") or not (stripped or begun):
            continue
        first = first if begun else number
        begun = f"{begun} {stripped}".strip()
        if begun.endswith("\\"):
            begun = begun[:-1].rstrip()
            continue
        yield first, " ".join(begun.split(maxsplit=1))
        begun = ""
    if begun:
        yield first, begun


def _pairs(rest: str) -> dict[str, str] | None:
    """Read the variables of ENV in both of its forms; None if they are not plain."""
    try:
        words = shlex.split(rest)
    except ValueError:
        return None
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])} if len(words) > 1 else None
    pairs = [word.partition("=") for word in words]
    if not pairs or not all(name.isidentifier() and equals for name, equals, _ in pairs) or "$" in rest:
        return None
    return {name: value for name, _, value in pairs}


def _copied(folder: Path, rest: str, workdir: str) -> list[tuple[Path, str]] | None:
    """Return what COPY copies where; None if it has options, a URL, a variable, or no such files."""
    try:
        words = shlex.split(rest)
    except ValueError:
        return None
    if len(words) < 2 or any(w.startswith(("--", "[", "http:", "https:", "git@")) or "$" in w for w in words):
        return None
    context = (folder / "environment").resolve()
    *patterns, target = words
    inside = PurePosixPath(workdir) / target
    into_folder = target.endswith(("/", ".")) or len(patterns) > 1
    found: list[tuple[Path, str]] = []
    for pattern in patterns:
        sources = (
            sorted(context.glob(pattern.strip("/") or ".")) if pattern not in (".", "./", "/") else [context]
        )
        sources = [source for source in sources if source.resolve().is_relative_to(context)]
        if not sources or any(source.suffix in (".gz", ".tgz", ".tar", ".xz", ".bz2") for source in sources):
            return None  # ADD would unpack it
        for source in sources:
            named = source.is_file() and (into_folder or len(sources) > 1)
            found.append((source, str(inside / source.name if named else inside)))
    return found
