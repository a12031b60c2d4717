"""The configuration of a run: one frozen tree, composed of the configs that the rooms define.

A file is YAML; `key=value` arguments override it, dots reach inside. A relative path in a file is
relative to that file, one given on the command line to the working directory; either way the loaded
tree holds absolute paths. Anything unknown is refused with the nearest known name.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import ConfigError
from areal_agents.inference.config import EngineConfig
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rollout.config import DataConfig, EvalConfig, RolloutConfig
from areal_agents.store.config import StoreConfig
from areal_agents.training.config import TrainerConfig


class Config(BaseModel):
    """Everything that one run needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="", description="Name of the run; empty: the config file's folder.")
    seed: int = Field(default=0, ge=0, description="Seed of data order, sampling and training.")
    run_dir: str = Field(default="", description="Folder of the run; empty: runs/<name>-seed<seed>.")
    model: str = Field(description="Hugging Face folder of the initial weights.")
    agent: str | dict[str, str] = Field(description="module:function, file.py:function, or {command: ...}.")
    ablation: str | None = Field(
        default=None, description="The same agent with its tools switched off; run by --ablate-tool."
    )
    data: DataConfig = Field(description="Training tasks.")
    eval: EvalConfig | None = Field(default=None, description="Held-out evaluation; absent: none.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    proxy: ProxyConfig = Field(default_factory=ProxyConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)

    @model_validator(mode="after")
    def _check_model(self) -> Config:
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(
                f"model: {self.model} is not a Hugging Face model folder (no config.json in it); "
                "give the path of a downloaded model"
            )
        return self


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
    tree = _with_absolute_paths(tree, path.resolve().parent)
    for override in overrides:
        key, value = _parse_override(override)
        _set(tree, key, _with_absolute_paths(_nest(key, value), Path.cwd()))
    if not tree.get("name"):
        tree["name"] = path.resolve().parent.name if path.stem == "config" else path.stem
    config = validate_config(tree, source=str(path))
    if not config.run_dir:
        run_dir = Path.cwd() / "runs" / f"{config.name}-seed{config.seed}"
        config = config.model_copy(update={"run_dir": str(run_dir)})
    return config


def validate_config(tree: Mapping[str, Any], *, source: str) -> Config:
    """Validate a plain tree. ConfigError names every fault and, for unknown keys, the nearest name."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(fault, Config) for fault in error.errors()]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None


def proxy_config(overrides: Sequence[str], **given: Any) -> ProxyConfig:
    """The settings of a proxy that is served by itself: `given`, and `key=value` overrides over it.

    ConfigError for an unknown key or a value that is not allowed, as in `load_config`.
    """
    tree = dict(given)
    for override in overrides:
        key, value = _parse_override(override)
        _set(tree, key, _nest(key, value))
    try:
        return ProxyConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(fault, ProxyConfig) for fault in error.errors()]
        raise ConfigError("; ".join(lines)) from None


def save_config(config: Config, path: Path) -> None:
    """Write the resolved tree, so that every process of a run reads the same one.

    Only the owner can read it: it may hold keys.
    """
    temporary = path.with_suffix(".tmp")
    temporary.touch(mode=0o600)
    temporary.chmod(0o600)
    temporary.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    temporary.replace(path)


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"expected key=value, got {override!r}, for example trainer.steps=10")
    try:
        return key.split("."), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {key} is not valid YAML: {error}") from None


def _nest(key: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(key):
        value = {part: value}
    return value


def _set(tree: dict[str, Any], key: Sequence[str], nested: Mapping[str, Any]) -> None:
    for part in key[:-1]:
        nested = nested[part]
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[key[-1]] = nested[key[-1]]


_PATH_KEYS = (("model",), ("agent",), ("ablation",), ("run_dir",), ("data", "path"), ("eval", "data", "path"))


def _with_absolute_paths(tree: Mapping[str, Any], base: Path) -> dict[str, Any]:
    out: dict[str, Any] = copy.deepcopy(dict(tree))
    for *parents, leaf in _PATH_KEYS:
        node: Any = out
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(leaf), str):
            node[leaf] = _absolute(node[leaf], base, always=leaf in ("model", "run_dir"))
    return out


def _absolute(value: str, base: Path, *, always: bool) -> str:
    """`value` resolved against `base` if it names a file there (a function may follow a colon)."""
    file, colon, function = value.partition(":") if ".py:" in value else (value, "", "")
    candidate = (base / file).resolve()
    if value and (always or candidate.exists()):
        return f"{candidate}{colon}{function}"
    return value


def _explain(fault: Mapping[str, Any], root: type[BaseModel]) -> str:
    location = [str(part) for part in fault["loc"]]
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        known = _known_keys(root, location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = (
            f"; did you mean {'.'.join([*location[:-1], nearest[0]])!r}?"
            if nearest
            else f"; known keys here: {', '.join(sorted(known))}"
        )
        return f"unknown key {key!r}{hint}"
    if fault["type"] == "missing":
        return f"{key!r} is required"
    if fault["type"] == "value_error":
        return (f"{key}: " if key else "") + str(fault["ctx"]["error"])
    return f"{key}: {fault['msg']} (got {fault['input']!r})"


def _known_keys(model: type[BaseModel], location: Iterable[str]) -> list[str]:
    for part in location:
        field = model.model_fields.get(part)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found:
            return found
    return None
