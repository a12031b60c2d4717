"""Refuses a configuration with a key or a password, which the file for another program would show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from areal_agents.errors import ConfigError

_SECRET_KEYS = ("admin_key", "project_keys", "key")
# name:password@, also where the password has a slash, but not a port before a path that has an @
_PASSWORD = re.compile(r"://[^/@\s:]*:(?!\d+/)[^@\s]+@|[?&](?:ssl)?password=")


def refuse_secrets(text: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError if a configuration has a key or a password, which a manifest would show."""
    tree = yaml.safe_load(text)
    given = [{key: yaml.safe_load(value)} for key, _, value in (one.partition("=") for one in overrides)]
    for path, value in (leaf for part in (tree, *given) for leaf in _leaves(part, "")):
        if path.rpartition(".")[2] in _SECRET_KEYS and value:
            raise ConfigError(
                f"{path}: manifests contain no keys; leave it out (the supervisor makes proxy.admin_key)"
            )
        if isinstance(value, str) and _PASSWORD.search(value):
            raise ConfigError(
                f"{path}: manifests contain no passwords; give it as a variable, such as PGPASSWORD, that "
                "cluster.kubernetes.secret or cluster.skypilot.secrets names"
            )


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and path.rpartition(".")[2] not in _SECRET_KEYS:
        return [leaf for key, v in value.items() for leaf in _leaves(v, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list) and path.rpartition(".")[2] not in _SECRET_KEYS:
        return [leaf for item in value for leaf in _leaves(item, path)]
    return [(path, value)]
