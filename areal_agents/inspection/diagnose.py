"""Collects what an issue about a run needs in one file: state, metrics, logs and stacks, without secrets.

Prompts, replies and tasks are not in it; errors of agents are, and may quote them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.health.rules import findings
from areal_agents.health.waiting import Waiting
from areal_agents.inspection.runs import is_running
from areal_agents.inspection.sources import config_of_run, read_json, store_of_run
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.run_folder import RunFolder
from areal_agents.sockets import address_of
from areal_agents.stacks import collect_stacks, innermost
from areal_agents.tls import trusting_authority
from areal_agents.version import __version__
from areal_agents.whole_files import replacing

LOG_BYTES = 500_000  # of the end of each log
ROWS = 500  # of the end of metrics.jsonl
FAILURES = 20  # errors of the episodes that failed last
ERROR_CHARACTERS = 300  # of each of them
COMMAND_S = 10.0  # longest time of a program that describes the machine
HIDDEN = "[removed]"
_SECRET_NAME = re.compile(
    r"(key|token|secret|pass|password|passwd|passphrase|credential|auth|authorization|cookie|_pat)s?(_?\d+)?$",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"tokens$", re.IGNORECASE)  # max_tokens, context_tokens: numbers
_SHORTEST_SECRET = 8  # shorter values of variables are not searched for in other texts
_PATTERNS = (
    re.compile(r"()\b(?:sk|hf|ghp|gho|github_pat|xox[a-z]|AKIA|AIza)[-_A-Za-z0-9]{12,}"),
    re.compile(r"(Bearer\s+)[^\s\"']+", re.IGNORECASE),
    re.compile(r"(Authorization[\"']?\s*[=:]\s*[\"']?\w+\s+)[^\s\"']+", re.IGNORECASE),
    re.compile(r"(://)[^/\s:@]*:[^/\s@]+(?=@)"),
    re.compile(r"(/e/)[^/\s\"']+"),  # the key of an episode
    re.compile(r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"()\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"),
    re.compile(r"((?:key|token|secret|passw(?:or)?d)[\"']?\s*[=:]\s*[\"']?)[^\s\"',}]{8,}", re.IGNORECASE),
    re.compile(
        r"(--?[\w-]*(?:key|token|secret|passw(?:or)?d)[\"']?,?\s+[\"']?)[^\s\"',-][^\s\"',]{7,}",
        re.IGNORECASE,
    ),  # an option of a command and its value
)


def diagnose(root: Path, out: Path | None = None, *, say: Callable[[str], None] = lambda text: None) -> Path:
    """Write the report on a run as a zip file, and return its path.

    Args:
        root: the folder of the run; the run may be running or have ended.
        out: the file; default: <name of the run>-diagnosis-<time>.zip in the current folder.
        say: called with each line of the summary.

    Raises:
        ConfigError: the folder is not that of a run, or there is no folder for `out`.
    """
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}")
    folder = RunFolder(root)
    config = config_of_run(folder)
    clean = Secrets(config, folder, os.environ).removed_from
    name = f"{root.resolve().name}-diagnosis-{time.strftime('%Y%m%d-%H%M%S')}"
    out = out or Path(f"{name}.zip")
    stacks = collect_stacks(folder.log("").parent)
    summary = [*_summary(folder, config, stacks)]
    for line in summary:
        say(clean(line))
    parts: list[tuple[str, str]] = [
        ("summary.txt", "\n".join(summary) + "\n"),
        ("config.json", json.dumps(with_secrets_hidden(config), indent=2)),
        ("machine.txt", "\n\n".join(_machine())),
        ("packages.txt", "\n".join(sorted(f"{d.name}=={d.version}" for d in distributions()))),
        *((f"stacks/{process}.txt", text) for process, text in stacks.items()),
        *_files(folder),
    ]
    with (
        replacing(out, private=True) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file,
    ):
        for path, text in parts:
            file.writestr(f"{name}/{path}", clean(text))
    return out


class Secrets:
    """Removes from texts what looks like a key, and the keys of a run and of this process's environment."""

    def __init__(self, config: Mapping[str, Any], folder: RunFolder, environment: Mapping[str, str]) -> None:
        found = {value for name, value in environment.items() if _is_secret(name)}
        found |= {str(value) for name, value in _leaves(config) if _is_secret(name)}
        found |= {str(value) for name, value in _leaves(_endpoints(folder)) if _is_secret(name)}
        found |= {json.dumps(value)[1:-1] for value in found}  # as they are in JSON
        known = sorted((value for value in found if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def removed_from(self, text: str) -> str:
        """Return the text with each secret replaced."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        for pattern in _PATTERNS:
            text = pattern.sub(rf"\g<1>{HIDDEN}", text)
        return text


def with_secrets_hidden(tree: Any) -> Any:
    """Return a configuration with the values of keys, tokens, secrets and passwords replaced."""
    if isinstance(tree, Mapping):
        return {
            name: HIDDEN if _is_secret(str(name)) and value else with_secrets_hidden(value)
            for name, value in tree.items()
        }
    if isinstance(tree, list):
        return [with_secrets_hidden(value) for value in tree]
    return tree


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value, name)
    elif tree is not None:
        yield name, tree


def _endpoints(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.root / "endpoints.json") or {}


def _summary(folder: RunFolder, config: Mapping[str, Any], stacks: Mapping[str, str]) -> Iterator[str]:
    """Yield what a reader of the issue looks at first."""
    metrics = MetricsFile(folder.metrics)
    problem = None
    try:
        metrics.update()
    except ConfigError as error:  # a report is wanted most when files are damaged
        problem = str(error)
    rows = metrics.rows
    running = is_running(folder)
    state = "running" if running else "finished" if folder.summary.exists() else "stopped"
    step = rows[-1]["step"] if rows else 0
    yield f"areal-agents {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"run {folder.root.resolve().name}: {state}, step {step} of {config['trainer']['steps']}"
    if problem is not None:
        yield f"the metrics cannot be read: {problem}"
    if rows:
        yield f"the last step was written {time.time() - rows[-1]['time']:.0f} s ago"
    yield from (f"health: {finding}" for finding in findings(rows))
    yield from _summary_of_store(folder, config, rows if running else None)
    for process, text in stacks.items():
        where = innermost(text)
        yield f"{process}: {f'its main thread is in {where}' if where else 'see its stacks'}"
    if running and not stacks:
        yield "no process of the run answered with its stacks; are they on another machine?"


def _summary_of_store(
    folder: RunFolder, config: Mapping[str, Any], running_rows: Sequence[Mapping[str, Any]] | None
) -> Iterator[str]:
    try:
        with store_of_run(folder) as store:
            activity, groups = store.activity(), store.group_counts()
            failed = [e for e in store.episodes(status="failed") if e.error][-FAILURES:]
    except ArealAgentsError as error:
        yield f"the store cannot be read: {error}"
        return
    yield "training groups: " + ", ".join(f"{count} {state}" for state, count in groups.items())
    yield (
        f"open episodes: {activity.open_episodes} of training, {activity.open_evaluations} held out; "
        f"{activity.unrewarded} ended ones wait for a reward"
    )
    endpoints = _endpoints(folder)
    if running_rows is not None and endpoints:
        scheme, host, port = endpoints.get("scheme", "http"), endpoints["proxy_host"], endpoints["proxy_port"]
        proxy = f"{scheme}://{address_of(host, port)}"
        waiting = Waiting(endpoints["engine_urls"], proxy, groups=config["rollout"]["groups"])
        with trusting_authority(endpoints.get("authority", "")):
            reason = waiting.reason(groups, activity, started=bool(running_rows))
        yield f"the next step: {reason}"
    yield from (f"failed episode {e.id}: {_beginning(e.error or '')}" for e in failed)


def _beginning(text: str) -> str:
    """Return the beginning of a string up to a word end, because part of a secret would not be recognised."""
    return text if len(text) <= ERROR_CHARACTERS else text[:ERROR_CHARACTERS].rpartition(" ")[0] + " …"


def _files(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield the end of the metrics and of each log, and the small files of the run."""
    if folder.metrics.exists():
        rows = folder.metrics.read_text().splitlines()[-ROWS:]
        yield "metrics.jsonl", "\n".join(rows) + "\n"
    for path in (folder.summary, folder.trial):
        if path.exists():
            yield path.name, path.read_text()
    for log in sorted(folder.log("").parent.glob("*.log")):
        yield f"logs/{log.name}", _end_of(log)


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        if size > LOG_BYTES:
            file.readline()  # the rest of a line, which may have a part of a secret
        return file.read().decode(errors="replace")


def _machine() -> Iterable[str]:
    yield f"{platform.platform()}\n{os.cpu_count()} processors\n{sys.version}"
    for command in (["nvidia-smi"], ["free", "-m"], ["df", "-h"]):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            yield f"{command[0]} did not end within {COMMAND_S:g} s"
            continue
        yield f"{' '.join(command)}\n{done.stdout}{done.stderr}"
