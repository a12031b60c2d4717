"""Writes what a caller gives in memory, such as functions and lists, to files that other processes read.

A function of a module is named by its file. A function of a notebook, of the main script or within another
function has no name that another process could import; it is pickled by value, with what it refers to.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_agents.config.files import with_absolute_paths
from areal_agents.errors import AgentError, ConfigError, DataError

AgentLike = str | Mapping[str, Any] | Callable[..., Any]
DataLike = str | Path | Callable[..., Any] | Iterable[Mapping[str, Any]]


def function_spec(given: str | Callable[..., Any], folder: Path, name: str) -> str:
    """Return how another process finds a function; a string is returned as it is.

    Raises:
        AgentError: the function cannot be pickled.
    """
    if isinstance(given, str):
        return given
    function = inspect.unwrap(given)
    file = getattr(inspect.getmodule(function), "__file__", None)
    importable = given.__module__ != "__main__" and "<locals>" not in getattr(
        given, "__qualname__", "<locals>"
    )
    if importable and file is not None and "." not in given.__qualname__:
        return f"{Path(file).resolve()}:{given.__qualname__}"
    import cloudpickle

    path = folder / f"{name}.pkl"
    module = inspect.getmodule(function)
    by_value = module if module is not None and module.__name__ != "__main__" else None
    if by_value is not None:
        cloudpickle.register_pickle_by_value(by_value)  # other processes may not find it
    try:
        data = cloudpickle.dumps(given)
    except Exception as error:
        raise AgentError(
            f"{name}: the function cannot be sent to another process ({type(error).__name__}: {error}); "
            "define it in a file and give file.py:function, or open what it refers to within the function"
        ) from error
    finally:
        if by_value is not None:
            cloudpickle.unregister_pickle_by_value(by_value)
    path.write_bytes(data)
    return f"{path}:{name}"


def data_config(given: DataLike, folder: Path, name: str) -> dict[str, Any]:
    """Return the configuration of a data source; rows are written to a file.

    Raises:
        DataError: a row cannot be written as JSON.
    """
    if isinstance(given, Path):
        return {"path": str(given.resolve())}
    if isinstance(given, str):
        path = Path(given)
        return {"path": str(path.resolve()) if path.exists() else given}
    if callable(given):
        return {"path": function_spec(given, folder, name)}
    path = folder / f"{name}.jsonl"
    try:
        path.write_text("".join(json.dumps(dict(row), allow_nan=False) + "\n" for row in given))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: every task must be a dict that can be written as JSON: {error}") from None
    return {"path": str(path)}


def write_config(
    folder: Path, *, agent: AgentLike, reward: Any, data: Any, eval_data: Any, settings: Mapping[str, Any]
) -> Path:
    """Write the configuration of a run into a folder, and return its path.

    Raises:
        ConfigError: a setting is given twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        _put(tree, key.split("."), value)
    named: dict[str, Any] = {
        "agent": dict(agent) if isinstance(agent, Mapping) else function_spec(agent, folder, "agent")
    }
    if data is not None:
        named["data"] = data_config(data, folder, "tasks")
    if eval_data is not None:
        named["eval"] = {"data": data_config(eval_data, folder, "heldout")}
    if isinstance(reward, Mapping):
        named["reward"] = {
            key: function_spec(value, folder, "reward") if callable(value) else value
            for key, value in reward.items()
        }
    elif reward is not None:
        named["reward"] = function_spec(reward, folder, "reward")
    for key, value in named.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            value = {**tree[key], **value}
        elif key in tree:
            raise ConfigError(f"{key} is given twice")
        tree[key] = value
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump(with_absolute_paths(tree, Path.cwd()), sort_keys=False))
    return path


def _put(tree: dict[str, Any], key: list[str], value: Any) -> None:
    for part in key[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{'.'.join(key)}: {part} is not a mapping of settings")
    last = tree.get(key[-1])
    if isinstance(last, dict) and isinstance(value, Mapping):
        last.update(value)
    elif key[-1] in tree:
        raise ConfigError(f"{'.'.join(key)} is given twice")
    else:
        tree[key[-1]] = dict(value) if isinstance(value, Mapping) else value
