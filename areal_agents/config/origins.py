"""Says where each value of a configuration comes from, for `areal-agents train --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from areal_agents.algorithms.presets import preset_values
from areal_agents.config.files import load_config, nested, parse_override, read_file, set_in
from areal_agents.config.profiles import PROFILES
from areal_agents.config.tree import LOOP_STALENESS, Config

FILE, ARGUMENT, DEFAULT = "file", "argument", "default"
_SECRET = ("admin_key", "project_keys", "key")
_DERIVED: dict[tuple[str, ...], str] = {
    ("run_dir",): "from the name and the seed",
}
_SHORT = ("reward", "episode")  # `reward: FUNCTION` is short for this key


def annotated(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Return the whole configuration of a run as YAML, with the origin of each value in a comment.

    An origin is `file`, `argument` (of the command line), the profile, the algorithm's preset, another key
    that the value follows from, or `default`. Keys of the proxy are not shown.

    Raises:
        ConfigError: as `load_config` does.
    """
    config = load_config(path, overrides)
    file, arguments = read_file(Path(path)), _tree_of(overrides)
    named_by = f"from the {'folder' if Path(path).stem == 'config' else 'file'}'s name"  # see load_config
    lines = [
        *_lines(config.model_dump(mode="json"), (), lambda at: origin(config, file, arguments, at, named_by))
    ]
    width = min(max(len(line) for line, _ in lines), 72)
    return "".join(f"{line.ljust(width)}  # {why}\n" if why else f"{line}\n" for line, why in lines)


def origin(
    config: Config, file: Mapping[str, Any], arguments: Mapping[str, Any], at: tuple[str, ...], named_by: str
) -> str:
    """Return the origin of the value at a path of the resolved configuration.

    Args:
        named_by: the origin of a name that is not given.
    """
    for tree, name in ((arguments, ARGUMENT), (file, FILE)):
        if _has(tree, at) or (at == _SHORT and isinstance(tree.get(_SHORT[0]), str)):
            return name
    if at[0] == "algorithm":
        for tree, name in ((arguments, ARGUMENT), (file, FILE)):
            if _is_given_flat(tree.get("algorithm"), at[1:]):
                return name
        key = at[-2] if at[-1] == "kind" else at[-1]
        preset = config.algorithm.preset
        return f"preset {preset}" if key in preset_values(preset) else DEFAULT
    if at == ("rollout", "max_staleness") and config.loop in LOOP_STALENESS:
        return f"loop: {config.loop}"
    if _has(PROFILES.get(config.profile, {}), at):
        return f"profile {config.profile}"
    return named_by if at == ("name",) else _DERIVED.get(at, DEFAULT)


def _tree_of(overrides: Sequence[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for override in overrides:
        key, value = parse_override(override)
        set_in(tree, key, nested(key, value))
    return tree


def _has(tree: Any, at: tuple[str, ...]) -> bool:
    for part in at:
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _is_given_flat(algorithm: Any, at: tuple[str, ...]) -> bool:
    """Whether a setting of the algorithm is given at any depth, or its kind as a string."""
    if isinstance(algorithm, str):
        return at == ("preset",)
    if not isinstance(algorithm, Mapping):
        return False
    name = at[-2] if at[-1] == "kind" and len(at) > 1 else at[-1]
    value = algorithm.get(name)
    if name in algorithm and (at[-1] != "kind" or isinstance(value, str) or _has(value, ("kind",))):
        return True
    return any(_is_given_flat(part, at) for part in algorithm.values() if isinstance(part, Mapping))


def _lines(tree: Mapping[str, Any], at: tuple[str, ...], origin_of: Any) -> Iterator[tuple[str, str]]:
    """Yield the lines of a tree as YAML, each with the origin of its value."""
    indent = "  " * len(at)
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, (*at, key), origin_of)
        else:
            if key in _SECRET and value:
                value = "***"
            text = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
            yield f"{indent}{key}: {text.removesuffix('...' + chr(10)).strip()}", origin_of((*at, key))
