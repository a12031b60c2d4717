"""`key=value` settings over a plain tree; dots reach inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from areal_agents.errors import ConfigError


def parse_override(override: str) -> tuple[list[str], Any]:
    """The parts of the key, and the value as YAML reads it. ConfigError if it is no `key=value`."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"expected key=value, got {override!r}, for example trainer.steps=10")
    try:
        return key.split("."), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {key} is not valid YAML: {error}") from None


def nested(key: Sequence[str], value: Any) -> dict[str, Any]:
    """A tree of nothing but `value`, at `key`."""
    for part in reversed(key):
        value = {part: value}
    return value


def set_in(tree: dict[str, Any], key: Sequence[str], nested: Mapping[str, Any]) -> None:
    """Put what `nested` holds at `key` into `tree`.

    A setting of the algorithm can be given flat or under its part: what the tree has of it in the other form
    is taken out.
    """
    if (
        len(key) > 1
        and key[0] == "algorithm"
        and key[-1] != "kind"
        and isinstance(tree.get("algorithm"), dict)
    ):
        tree["algorithm"] = _without(tree["algorithm"], key[-1])
    for part in key[:-1]:
        nested = nested[part]
        # A string is short for a preset, or for the kind of one of its parts.
        if key[0] == "algorithm" and isinstance(tree.get(part), str):
            tree[part] = {"preset" if part == "algorithm" else "kind": tree[part]}
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[key[-1]] = nested[key[-1]]


def _without(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of a tree without the settings of this name, at any depth."""
    return {
        key: _without(value, name) if isinstance(value, dict) else value
        for key, value in tree.items()
        if key != name
    }
