"""Reads a configuration from a YAML file and `key=value` overrides, checks it, and writes it to a file.

Overrides take precedence over the file; a dot in a key reaches into a nested mapping. A relative path in a
file is relative to the file's folder, and one in an override to the working directory; the loaded tree holds
absolute paths only. What pydantic refuses is reported under the keys of the configuration file, and an
unknown key with the nearest known one.
"""

from __future__ import annotations

import copy
import difflib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, Tag, ValidationError

from areal_agents.algorithms.parts import alternatives, as_yaml
from areal_agents.config.models import is_model_name, model_folder
from areal_agents.config.tree import Config
from areal_agents.errors import ConfigError
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rollout.config import is_data_file
from areal_agents.whole_files import write_whole

Model = TypeVar("Model", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = (), *, weights: bool = True) -> Config:
    """Read a YAML file, apply `key=value` overrides, and validate the result.

    Args:
        weights: whether a model of the Hub is downloaded with its weights.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown (the nearest known one is
            named), or a value is not allowed.
    """
    path = Path(path)
    tree = with_absolute_paths(read_file(path), path.resolve().parent)
    for override in overrides:
        key, value = parse_override(override)
        set_in(tree, key, with_absolute_paths(nested(key, value), Path.cwd()))
    _find_models(tree, weights=weights)
    if not tree.get("name"):
        tree["name"] = path.resolve().parent.name if path.stem == "config" else path.stem
    config = validate_config(tree, source=str(path))
    if not config.run_dir:
        run_dir = Path.cwd() / "runs" / f"{config.name}-seed{config.seed}"
        config = config.model_copy(update={"run_dir": str(run_dir)})
    if _records_itself(config):
        raise ConfigError(
            f"{path}:\n  data.episodes: {config.data.episodes} is this run's own store; training on it would "
            "resume that run and write to its store; choose another folder with run_dir=..."
        )
    return config


def _find_models(tree: dict[str, Any], *, weights: bool) -> None:
    """Replace the names of models by folders; models of the Hub are downloaded, if wanted without weights."""
    for *parents, leaf in _MODEL_KEYS:
        node: Any = tree
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(leaf), str) and node[leaf]:
            node[leaf] = model_folder(node[leaf], Path.cwd(), weights=weights)


def read_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, unchecked. Raises ConfigError if there is none."""
    try:
        tree = yaml.load(path.read_text(), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a config file: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must contain a mapping of keys to values")
    return tree


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML would keep the last one only."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping. Raises ConstructorError for a repeated key."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_MERGE = "tag:yaml.org,2002:merge"


def _records_itself(config: Config) -> bool:
    """Whether the recorded episodes to train on are those of the run's own store."""
    recorded, own = config.data.episodes, Path(config.run_dir).resolve()
    if not recorded:
        return False
    return recorded == config.store.url or Path(recorded).resolve() in (own, own / "store.db")


def validate_config(tree: Mapping[str, Any], *, source: str) -> Config:
    """Validate a plain tree. Raises ConfigError with every fault, and the nearest name of an unknown key."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [explain(fault, Config) for fault in error.errors()]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None


def proxy_config(overrides: Sequence[str], **given: Any) -> ProxyConfig:
    """Return the settings of a proxy that runs outside a run: `given`, overridden by `key=value` settings.

    Raises ConfigError for an unknown key or a value that is not allowed, as `load_config` does.
    """
    return with_overrides(ProxyConfig, given, overrides)


def with_overrides(model: type[Model], given: Mapping[str, Any], overrides: Iterable[str]) -> Model:
    """Return the `given` settings of one component, overridden by `key=value` settings.

    Raises ConfigError as `load_config` does.
    """
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

    Only the owner can read the file, because it may contain keys.
    """
    write_whole(path, _text_of(config), private=True)


def is_saved(config: Config, path: Path) -> bool:
    """Whether `save_config` wrote this tree to `path` last."""
    return path.exists() and path.read_text() == _text_of(config)


def _text_of(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def parse_override(override: str) -> tuple[list[str], Any]:
    """Return the parts of the key, and the value as YAML reads it. Raises ConfigError if there is no `=`."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"expected key=value, for example trainer.steps=10, got {override!r}")
    try:
        return key.split("."), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {key} is not valid YAML: {error}") from None


def nested(key: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a tree that contains only `value`, at `key`."""
    for part in reversed(key):
        value = {part: value}
    return value


def set_in(tree: dict[str, Any], key: Sequence[str], nested: Mapping[str, Any]) -> None:
    """Set the value that `nested` has at `key` in `tree`.

    A setting of the algorithm can be given flat or under its part; if the tree has it in the other form, that
    one is removed.
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
        # A string is a shorthand for a preset, or for the kind of one of its parts.
        if key[0] == "algorithm" and isinstance(tree.get(part), str):
            tree[part] = {"preset" if part == "algorithm" else "kind": tree[part]}
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[key[-1]] = nested[key[-1]]


def _without(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a tree without the settings of this name, at any depth."""
    return {
        key: _without(value, name) if isinstance(value, dict) else value
        for key, value in tree.items()
        if key != name
    }


_PATH_KEYS = (
    ("model",), ("agent",), ("ablation",), ("run_dir",), ("data", "path"), ("data", "episodes"),
    ("reward", "episode"), ("reward", "group"),
    ("eval", "data", "path"), ("eval", "answer"), ("trainer", "critic_model"), ("trainer", "reference_model"),
    ("trainer", "teacher_model"),
    ("engine", "python"), ("store", "retain", "export"), ("trainer", "publish", "folder"),
)  # fmt: skip
_MODEL_KEYS = (
    ("model",), ("trainer", "critic_model"), ("trainer", "reference_model"), ("trainer", "teacher_model"),
)  # fmt: skip
_FILE_OPTIONS = ("held_out", "rows")  # of an environment
_ALWAYS_PATHS = ("model", "run_dir", "critic_model", "reference_model", "teacher_model", "export", "folder")


def with_absolute_paths(tree: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return a copy of `tree` in which paths that are relative to `base` are absolute."""
    out: dict[str, Any] = copy.deepcopy(dict(tree))
    for *parents, leaf in _PATH_KEYS:
        node: Any = out
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict) or not isinstance(node.get(leaf), str):
            continue
        if (*parents, leaf) not in _MODEL_KEYS or not is_model_name(node[leaf], base):
            is_path = leaf in _ALWAYS_PATHS or (leaf == "episodes" and "://" not in node[leaf])
            node[leaf] = _absolute(node[leaf], base, always=is_path)
    if isinstance(out.get("reward"), str):
        out["reward"] = _absolute(out["reward"], base, always=False)
    if "environment" in out:
        out["environment"] = _with_absolute_environment(out["environment"], base)
    if isinstance(out.get("environments"), list):
        out["environments"] = [_with_absolute_environment(one, base) for one in out["environments"]]
    evaluation = out.get("eval")
    for data in (out.get("data"), evaluation.get("data") if isinstance(evaluation, dict) else None):
        for source in _sources_of(data):
            if isinstance(source.get("path"), str):
                source["path"] = _absolute(source["path"], base, always=False)
            if "environment" in source:
                source["environment"] = _with_absolute_environment(source["environment"], base)
    if isinstance(out.get("agent"), dict):
        out["agent"] = _with_absolute_agent(out["agent"], base)
    return out


def _with_absolute_agent(agent: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return the settings of an agent with absolute paths; those inside its sandbox stay as they are."""
    out = dict(agent)
    isolation = out.get("isolation", "none")
    named = {key for key, value in out.items() if isinstance(value, str)}
    if "workdir" in named:
        out["workdir"] = _absolute(out["workdir"], base, always=True)
    if "image" in named and isolation == "bubblewrap":  # a folder; with docker it is the name of an image
        out["image"] = _absolute(out["image"], base, always=False)
    job = out.get("job")
    if isinstance(job, dict) and isinstance(job.get("template"), str):
        out["job"] = {**job, "template": _absolute(job["template"], base, always=True)}
    in_pod = isinstance(job, dict) and job.get("kind") == "kubernetes"  # whose image has other files
    if "command" in named and isolation == "none" and not in_pod:
        out["command"] = _with_absolute_files(out["command"], base)
    if "cli" in named and ("/" in out["cli"] or out["cli"].endswith(".toml")):
        out["cli"] = _absolute(out["cli"], base, always=True)
    if "executable" in named and "/" in out["executable"] and isolation != "docker":
        out["executable"] = _absolute(out["executable"], base, always=True)
    if isinstance(out.get("readable"), list):
        out["readable"] = [_absolute(str(path), base, always=True) for path in out["readable"]]
    return out


def _sources_of(data: Any) -> list[dict[str, Any]]:
    sources = data.get("sources") if isinstance(data, dict) else None
    return [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []


def _with_absolute_environment(setting: Any, base: Path) -> Any:
    """Return the setting of an environment, a line or a mapping, with absolute paths."""
    if isinstance(setting, str):
        return _with_absolute_address(setting, base)
    if not isinstance(setting, dict):
        return setting
    out = dict(setting)
    if isinstance(out.get("use"), str):
        out["use"] = _with_absolute_address(out["use"], base)
    if isinstance(out.get("python"), str):
        out["python"] = _absolute(out["python"], base, always=False)
    return out


def _with_absolute_address(line: str, base: Path) -> str:
    """Return the line of an environment with an absolute path where it names a file or a folder."""
    scheme, colon, rest = line.partition(":")
    address, mark, options = rest.partition("?")
    found = (
        _with_absolute_files(address, base)
        if scheme in ("mcp", "openenv")
        else _absolute(address, base, always=False)
    )
    given = [option.partition("=") for option in options.split("&")]
    named = [
        f"{name}{equals}{_absolute(value, base, always=False) if name in _FILE_OPTIONS else value}"
        for name, equals, value in given
    ]
    return f"{scheme}{colon}{found}{mark}{'&'.join(named)}"


def _with_absolute_files(command: str, base: Path) -> str:
    """Return a command in which each word that is a relative path of an existing file is absolute.

    A word without a slash is a file only if it has a suffix, so that a file named `python` does not hide the
    program.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # unbalanced quotes, which `load_agent` reports
        return command
    files = {
        word: str(base / word)
        for word in words
        if not os.path.isabs(word) and ("/" in word or Path(word).suffix) and (base / word).is_file()
    }
    return shlex.join(files.get(word, word) for word in words) if files else command


def _absolute(value: str, base: Path, *, always: bool) -> str:
    """Return `value` resolved against `base` if it names a file or a folder (a function may follow a colon).

    A name that could be something else, such as a module or a data set of the Hub, is a path if it exists.
    """
    is_function = ".py:" in value
    file, colon, function = value.partition(":") if is_function else (value, "", "")
    always = always or is_function or is_data_file(value)
    # Symbolic links are kept: the Python of an environment is one.
    candidate = Path(os.path.normpath(base / os.path.expanduser(file)))
    if value and (always or candidate.exists()):
        return f"{candidate}{colon}{function}"
    return value


def explain(fault: Mapping[str, Any], root: type[BaseModel]) -> str:
    """Describe one fault that `root` found in a tree; for an unknown key, with the nearest known one."""
    location = _without_kinds(root, [str(part) for part in fault["loc"]])
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_nearest_key(root, location)}"
    if fault["type"] == "missing":
        return f"{key!r} is required"
    if fault["type"] == "value_error":
        return (f"{key}: " if key else "") + str(fault["ctx"]["error"])
    if fault["type"] == "model_type":
        forms = {
            "data": "data: {path: ...}",
            "eval.data": "data: {path: ...}",
            "eval": "eval: {data: {path: ...}}",
        }
        example = f", such as {forms[key]}" if key in forms else ""
        return f"{key}: must be a mapping of settings{example} (got {as_yaml(fault['input'])})"
    return f"{key}: {fault['msg']} (got {as_yaml(fault['input'])})"


def _nearest_key(root: type[BaseModel], location: Sequence[str]) -> str:
    """Name a known key that an unknown one may stand for: the same name elsewhere, or a similar one here."""
    *parents, name = location
    elsewhere = [".".join(path) for path in _paths_of(root) if path[-1] == name]
    if elsewhere:
        return f"did you mean {' or '.join(repr(path) for path in elsewhere[:3])}?"
    known = _known_keys(root, parents)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if nearest:
        return f"did you mean {'.'.join([*parents, nearest[0]])!r}?"
    return f"known keys here: {', '.join(sorted(known))}"


def _paths_of(model: type[BaseModel], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key below a model that is not one of several alternatives."""
    for name, field in model.model_fields.items():
        yield (*parents, name)
        inner = _model_in(field.annotation)
        if inner is not None and not alternatives(field):
            yield from _paths_of(inner, (*parents, name))


def _without_kinds(model: type[BaseModel] | None, location: list[str]) -> list[str]:
    """Return a location as a config file has it: without pydantic's tags for alternative parts."""
    field = model.model_fields.get(location[0]) if model and location else None
    if field is None:
        return location
    first, rest = location[0], location[1:]
    parts = alternatives(field)
    if rest and rest[0] in parts:
        return [first, *_without_kinds(parts[rest[0]], rest[1:])]
    if rest and rest[0] in _tags(field.annotation):
        rest = rest[1:]
    return [first, *_without_kinds(_model_in(field.annotation), rest)]


def _tags(annotation: Any) -> set[str]:
    """Return pydantic's tags for the alternatives of a union."""
    members = getattr(annotation, "__args__", ())
    return {
        item.tag
        for member in members
        for item in getattr(member, "__metadata__", ())
        if isinstance(item, Tag)
    }


def _known_keys(model: type[BaseModel], location: Iterable[str]) -> list[str]:
    for part in location:
        if part.isdigit():  # an index into the list that the part before it names
            continue
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
