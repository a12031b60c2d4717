"""The fingerprint of a run: digests of its agent, environment, reward function and held-out tasks.

A user may change these and resume the run. Held-out rewards from before and after a change cannot be
compared, so each start of a run compares its fingerprint with that of the last start, and every evaluation is
recorded with the fingerprint that it was played with.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.config import Config
from areal_agents.environments.config import EnvironmentConfig
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.schemes import SCHEMES
from areal_agents.launch.source_files import digests_of, modules_behind
from areal_agents.rollout.config import CommandAgentConfig, DataConfig, TasksConfig
from areal_agents.whole_files import write_whole

_VERSIONS_S = 30.0  # longest wait for another interpreter to name the versions of its packages
_NAMED = "as the configuration names it"
_HELD_OUT = "held-out tasks"

Parts = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the episodes of a run are played with.

    Attributes:
        parts: by part ("agent", "reward", …), by name the digest of a file or the version of a package.
    """

    parts: Parts

    @classmethod
    def of(cls, config: Config) -> Fingerprint:
        """Return the fingerprint of a configuration, of its files and packages as they are now."""
        parts: dict[str, Mapping[str, str]] = {}
        if config.environment is not None:
            parts["environment"] = _of_environment(config.environment)
        elif config.environments:
            for environment in config.environments:
                parts[f"environment {environment.name}"] = _of_environment(environment)
        else:
            parts["agent"] = _of_agent(config.agent)
        if config.reward is not None:
            named = config.reward.episode or config.reward.group
            parts["reward"] = {_NAMED: _function_of(named), **digests_of(named)}
        limits = config.rollout.limits.model_dump(mode="json", exclude_none=True)
        parts["limits of an episode"] = {_NAMED: json.dumps(limits)}
        if config.eval is not None:
            parts[_HELD_OUT] = _of_data(config.eval.data, config.eval.episodes)
        return cls(parts)

    @property
    def digest(self) -> str:
        """A digest of all parts, of 12 hexadecimal digits."""
        return _digest(self.parts)

    @property
    def digest_in_training(self) -> str:
        """The same without the held-out tasks, which training episodes do not play."""
        return _digest({part: names for part, names in self.parts.items() if part != _HELD_OUT})

    def changes_since(self, earlier: Parts) -> str:
        """Return a phrase that names what differs from `earlier`; "" if nothing does."""
        found = []
        for part in dict.fromkeys((*earlier, *self.parts)):
            before, now = earlier.get(part, {}), self.parts.get(part, {})
            names = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
            if names:
                found.append(
                    f"the {part} ({', '.join(_change(n, before.get(n), now.get(n)) for n in names)})"
                )
        return " and ".join(found)


@dataclass(frozen=True, slots=True)
class FingerprintFile:
    """The file fingerprint.json of a run: its fingerprints, each with the step at which it was first used."""

    path: Path

    def last(self) -> Parts | None:
        """Return the parts of the last start; None before the first one."""
        return self._read()[-1]["parts"] if self.path.exists() else None

    def record(self, fingerprint: Fingerprint, *, step: int) -> str:
        """Add the fingerprint if it differs from the last one; return what has changed, as `changes_since`.

        Args:
            step: the last step that is trained.
        """
        starts = self._read() if self.path.exists() else []
        changes = fingerprint.changes_since(starts[-1]["parts"]) if starts else ""
        if changes or not starts:
            start = {"digest": fingerprint.digest, "step": step, "time": time.time(), "changes": changes}
            starts.append({**start, "parts": fingerprint.parts})
            write_whole(self.path, json.dumps(starts, indent=1) + "\n")
        return changes

    def changes(self) -> dict[str, str]:
        """Return, by the digest of a fingerprint, what had changed and after which step, as a clause."""
        starts = self._read()[1:] if self.path.exists() else []
        return {start["digest"]: f"{start['changes']} changed after step {start['step']}" for start in starts}

    def _read(self) -> list[dict[str, Any]]:
        starts: list[dict[str, Any]] = json.loads(self.path.read_text())
        return starts


def notice_of(changes: str) -> str:
    """Return the notice for the user that a fingerprint has changed; `changes` is that of `changes_since`."""
    return (
        f"{changes} changed since the run was last started: the run continues with the weights that it has, "
        "and held-out rewards are compared only with those that are measured from now on"
    )


def _change(name: str, before: str | None, now: str | None) -> str:
    if before is None or now is None:
        return f"{name} {'is new' if before is None else 'is no longer used'}"
    return f"{name}: {before} → {now}" if name.startswith("package ") else name


def _of_agent(agent: Any) -> dict[str, str]:
    if isinstance(agent, str):
        return {_NAMED: _function_of(agent), **digests_of(agent)}
    setting = agent.model_dump(mode="json") if isinstance(agent, CommandAgentConfig) else dict(agent)
    files = digests_of(setting["command"]) if "command" in setting else {}
    job = setting.pop("job", None)
    if job is not None:
        files |= digests_of(job["template"])
    return {_NAMED: json.dumps(setting, sort_keys=True, default=str), **files}


def _of_environment(environment: EnvironmentConfig) -> dict[str, str]:
    """Return the files and the packages behind the line of an environment."""
    line = EnvironmentLine.read(environment.use)
    scheme = SCHEMES.get(line.scheme)
    names = {line.name, line.name.partition(":")[0].partition("@")[0]}
    found = {_NAMED: environment.use}
    for name in sorted(names):
        found.update(digests_of(name))
        if not environment.python and all(part.isidentifier() for part in name.replace("-", "_").split(".")):
            found.update(modules_behind(name.replace("-", "_")))
    packages = {name for name in names if name.replace("-", "_").replace(".", "_").isidentifier()}
    if scheme is not None and scheme.package:
        packages.add(scheme.distribution)
    for package, version in _versions(sorted(packages), environment.python).items():
        found[f"package {package}"] = version
    return found


def _of_data(data: DataConfig, episodes: int) -> dict[str, str]:
    if data.sources:
        found: dict[str, str] = {}
        named = []
        for source in data.sources:
            of_source = _of_tasks(source, data.seed, episodes)
            named.append(f"{source.name} ({source.weight:g}): {of_source.pop(_NAMED)}")
            found |= of_source
        return {_NAMED: "; ".join(named), **found}
    return _of_tasks(data, data.seed, episodes)


def _of_tasks(tasks: TasksConfig, seed: int | None, episodes: int) -> dict[str, str]:
    if tasks.environment is not None:
        return {_NAMED: f"{tasks.environment.use} {tasks.split} {episodes}"}
    named = _function_of(tasks.path)
    settings = {"subset": tasks.subset, "split": tasks.split, "id": tasks.id, "seed": seed}
    return {_NAMED: f"{named} {json.dumps(settings)} {episodes}", **digests_of(tasks.path)}


def _digest(parts: Parts) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _function_of(named: str) -> str:
    """Return a name without its folder, so that moving a project does not change its fingerprint."""
    return Path(named).name if "/" in named else named


def _versions(packages: list[str], python: str) -> dict[str, str]:
    """Return the versions of the packages that are installed for an interpreter; python "": this one."""
    if not python:
        return _own_versions(packages)
    code = (
        "import importlib.metadata as m, json, sys\n"
        "names = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(json.dumps(names))"
    )
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True, timeout=_VERSIONS_S
        )
        installed = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):  # the start of the environment reports it
        return {}
    wanted = {package: package.lower().replace("_", "-") for package in packages}
    return {package: installed[name] for package, name in wanted.items() if name in installed}


def _own_versions(packages: list[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
