"""A configuration from its file and from the command line, and back into a file.

`key=value` arguments override what the file says. A relative path in a file is relative to that file, one
given on the command line to the working directory; either way the loaded tree holds absolute paths.
Anything unknown is refused with the nearest known name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from areal_agents.config.explaining import explain
from areal_agents.config.overrides import nested, parse_override, set_in
from areal_agents.config.paths import with_absolute_paths
from areal_agents.config.tree import Config
from areal_agents.errors import ConfigError
from areal_agents.proxy.config import ProxyConfig

Model = TypeVar("Model", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `key=value` overrides, and validate.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown (the nearest known one is
            named), or a value is not allowed.
    """
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a config file: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    tree = with_absolute_paths(tree, path.resolve().parent)
    for override in overrides:
        key, value = parse_override(override)
        set_in(tree, key, with_absolute_paths(nested(key, value), Path.cwd()))
    if not tree.get("name"):
        tree["name"] = path.resolve().parent.name if path.stem == "config" else path.stem
    config = validate_config(tree, source=str(path))
    if not config.run_dir:
        run_dir = Path.cwd() / "runs" / f"{config.name}-seed{config.seed}"
        config = config.model_copy(update={"run_dir": str(run_dir)})
    if _records_itself(config):
        raise ConfigError(
            f"{path}:\n  data.episodes: {config.data.episodes} is this run's own; training on it would go on "
            "with that run and write to its store; choose another folder with run_dir=..."
        )
    return config


def _records_itself(config: Config) -> bool:
    """Whether the recorded episodes to train on are those of the run folder that is written to."""
    recorded, own = config.data.episodes, Path(config.run_dir).resolve()
    if not recorded:
        return False
    return recorded == config.store.url or Path(recorded).resolve() in (own, own / "store.db")


def validate_config(tree: Mapping[str, Any], *, source: str) -> Config:
    """Validate a plain tree. ConfigError names every fault and, for unknown keys, the nearest name."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [explain(fault, Config) for fault in error.errors()]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None


def proxy_config(overrides: Sequence[str], **given: Any) -> ProxyConfig:
    """The settings of a proxy that is served by itself: `given`, and `key=value` overrides over it.

    ConfigError for an unknown key or a value that is not allowed, as in `load_config`.
    """
    return with_overrides(ProxyConfig, given, overrides)


def with_overrides(model: type[Model], given: Mapping[str, Any], overrides: Iterable[str]) -> Model:
    """`given` settings of one component, with `key=value` overrides over them. ConfigError as above."""
    tree = copy.deepcopy(dict(given))
    for override in overrides:
        key, value = parse_override(override)
        set_in(tree, key, nested(key, value))
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        lines = [explain(fault, model) for fault in error.errors()]
        raise ConfigError("; ".join(lines)) from None


def save_config(config: Config, path: Path) -> None:
    """Write the resolved tree, so that every process of a run reads the same one.

    Only the owner can read it: it may hold keys.
    """
    temporary = path.with_suffix(".tmp")
    temporary.touch(mode=0o600)
    temporary.chmod(0o600)
    temporary.write_text(_text_of(config))
    temporary.replace(path)


def is_saved(config: Config, path: Path) -> bool:
    """Whether `save_config` wrote this tree to `path` last."""
    return path.exists() and path.read_text() == _text_of(config)


def _text_of(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
