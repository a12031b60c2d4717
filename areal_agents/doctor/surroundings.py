"""Finds the servers that an agent may call besides the proxy, from its environment and its source.

Source code is parsed and never run. Of a URL only the host is kept, because URLs may contain keys.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

# These are set for every command, so their values outside do not matter.
GIVEN_TO_COMMANDS = frozenset(
    {"OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"}
)
_URL_NAME = re.compile(r"(_BASE_URL|_API_BASE|_BASE|_API_URL|_ENDPOINT|_API_HOST)$")
_HTTP_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_MOST_FILES = 50


@dataclass(frozen=True, slots=True)
class Host:
    """A host, and `where` it is named: an environment variable or file:line."""

    host: str
    where: str


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A framework that reports to a server unless `variable` is set to `value`."""

    framework: str
    variable: str
    value: str
    what: str


@dataclass(frozen=True, slots=True)
class _Known:
    import_name: str
    client: str  # part of its User-Agent; "" if it has none
    telemetry: Telemetry
    switch: str = ""  # a name in the source that shows that the agent turns telemetry off


_KNOWN = (
    _Known(
        "agents",
        "Agents/Python",
        Telemetry("openai-agents", "OPENAI_AGENTS_DISABLE_TRACING", "1", "uploads traces to api.openai.com"),
        switch="tracing_disabled",
    ),
    _Known(
        "crewai",
        "",
        Telemetry("crewai", "CREWAI_DISABLE_TELEMETRY", "true", "sends usage data to its vendor"),
    ),
    _Known("agno", "", Telemetry("agno", "AGNO_TELEMETRY", "false", "sends usage data to its vendor")),
    _Known(
        "browser_use",
        "",
        Telemetry("browser-use", "ANONYMIZED_TELEMETRY", "false", "sends usage data to its vendor"),
    ),
    _Known(
        "litellm",
        "litellm",
        Telemetry("litellm", "LITELLM_LOCAL_MODEL_COST_MAP", "True", "fetches model prices on import"),
    ),
    _Known(
        "claude_agent_sdk",
        "claude-cli",
        Telemetry(
            "claude-code",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
            "1",
            "sends usage data and checks for updates",
        ),
    ),
    _Known(
        "haystack",
        "",
        Telemetry("haystack", "HAYSTACK_TELEMETRY_ENABLED", "false", "sends usage data to its vendor"),
    ),
)


def hosts_in_environment(environment: Mapping[str, str], *, overridden: Iterable[str] = ()) -> list[Host]:
    """Return the outside hosts that variables other than `overridden` name as a base URL or endpoint."""
    ours = set(overridden)
    found = []
    for name, value in sorted(environment.items()):
        if name not in ours and _URL_NAME.search(name) and (host := _outside(value)):
            found.append(Host(host, name))
    return found


def http_proxy_in_the_way(environment: Mapping[str, str]) -> Host | None:
    """Return the HTTP proxy through which calls to this machine would go, if there is one."""
    direct = environment.get("NO_PROXY", environment.get("no_proxy", ""))
    if any(name.strip() in ("*", *_LOOPBACK) for name in direct.split(",")):
        return None
    for name in _HTTP_PROXIES:
        if environment.get(name) and (host := _outside(environment[name])):
            return Host(host, name)
    return None


def telemetry_of(
    imported: Iterable[str], clients: Iterable[str], environment: Mapping[str, str], source: str = ""
) -> list[Telemetry]:
    """Return the frameworks that report to outside servers, found by imported packages and User-Agents.

    `source` is the agent's source code, which may turn telemetry off.
    """
    names, agents = set(imported), tuple(clients)
    return [
        known.telemetry
        for known in _KNOWN
        if known.import_name in names or (known.client and any(known.client in agent for agent in agents))
        if not (known.switch and known.switch in source)
        if environment.get(known.telemetry.variable, "").lower() not in _settings(known.telemetry.value)
    ]


def sources_of(command: Sequence[str], function: str | None) -> list[Path]:
    """Return the agent's own files: the named ones, and the files beside them that they import."""
    waiting = [Path(part).resolve() for part in command if part.endswith(".py") and Path(part).is_file()]
    if function is not None:
        target = function.rpartition(":")[0]
        path = Path(target) if target.endswith(".py") else _file_of(target)
        waiting += [path.resolve()] if path is not None and path.is_file() else []
    found: list[Path] = []
    while waiting and len(found) < _MOST_FILES:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        neighbours = (path.parent / f"{name}.py" for name in imports_of([path]))
        waiting += [neighbour for neighbour in neighbours if neighbour.is_file()]
    return found


def imports_of(files: Iterable[Path]) -> set[str]:
    """Return the top-level names of the packages that files import."""
    names: set[str] = set()
    for node in (node for path in files for node in ast.walk(_parsed(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def hosts_in_sources(files: Iterable[Path]) -> list[Host]:
    """Return the outside hosts of URLs that are string literals in files."""
    found: dict[str, Host] = {}
    for path in files:
        for line, text in _texts(_parsed(path)):
            if host := _outside(text):
                found.setdefault(host, Host(host, f"{path.name}:{line}"))
    return list(found.values())


def text_of(files: Iterable[Path]) -> str:
    """Return the contents of files, joined."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # running the file reports the error better
        return ast.Module([], [])


def _file_of(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _outside(url: str) -> str:
    """Return the host of a URL if it is not this machine, else ""."""
    if not url.startswith(("http://", "https://")):
        return ""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return ""
    return "" if host in _LOOPBACK else host


def _settings(value: str) -> frozenset[str]:
    """Return the values of a switch that mean the same as `value`."""
    on, off = frozenset({"1", "true", "yes"}), frozenset({"0", "false", "no"})
    return on if value.lower() in on else off
