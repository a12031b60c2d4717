"""Imports functions that users name as `module:function` or `path/to/file.py:function`.

An exception of user code is reported on one line, with the line of the user's own code that raised it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_agents.errors import ArealAgentsError


def names_a_function(spec: str) -> bool:
    """Whether `spec` has the form of a function's name rather than of a file or a data set."""
    target, colon, function = spec.rpartition(":")
    if not colon or not function.isidentifier():
        return False
    return target.endswith((".py", ".pkl")) or all(part.isidentifier() for part in target.split("."))


def load_function(spec: str, error_type: type[ArealAgentsError]) -> Callable[..., Any]:
    """Import a function. A file's folder is put first on `sys.path`, so that it can import its neighbours.

    Raises:
        error_type: the spec is malformed, the file or function is missing, or the import failed; the
            message names the line of the user's code.
    """
    if not names_a_function(spec):
        raise error_type(f"expected module:function or path/to/file.py:function, got {spec!r}")
    target, _, name = spec.rpartition(":")
    if target.endswith(".pkl"):
        return _unpickled(Path(target), error_type)
    module = (
        _load_file(Path(target), error_type) if target.endswith(".py") else _load_module(target, error_type)
    )
    try:
        function = getattr(module, name)
    except AttributeError:
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise error_type(f"{target} has no function {name!r}; it has {', '.join(public) or 'none'}") from None
    if not callable(function):
        raise error_type(f"{spec} must be a function, got {type(function).__name__}")
    return function


def _unpickled(path: Path, error_type: type[ArealAgentsError]) -> Callable[..., Any]:
    """Return a function that `areal_agents.train` has pickled by value."""
    import cloudpickle

    try:
        return cloudpickle.loads(path.read_bytes())
    except Exception as error:
        raise error_type(f"cannot load the function in {path}: {describe(error)}") from error


def _load_module(name: str, error_type: type[ArealAgentsError]) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would
    return _import(name, name, error_type)


def _load_file(path: Path, error_type: type[ArealAgentsError]) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise error_type(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    # Imported by its plain name, so that a neighbour that imports it gets the same module, unless another
    # module already has that name.
    if _is_file(sys.modules.get(path.stem), path):
        return sys.modules[path.stem]
    found = None if path.stem in sys.modules else importlib.util.find_spec(path.stem)
    if found is not None and found.origin == str(path):
        return _import(path.stem, str(path), error_type)
    name = f"{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # a .py file that exists
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException as error:
            del sys.modules[name]
            raise _import_error(str(path), error, error_type) from error
    return sys.modules[name]


def _import(name: str, shown: str, error_type: type[ArealAgentsError]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except BaseException as error:
        raise _import_error(shown, error, error_type) from error


def _import_error(shown: str, error: BaseException, error_type: type[ArealAgentsError]) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return error
    return error_type(f"cannot import {shown}: {describe(error)}")


def _is_file(module: ModuleType | None, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = f"{Path(__file__).parent}/"
_INSTALLED = ("/site-packages/", "/dist-packages/")  # also of another environment, as .pth files add them


def is_user_code(filename: str) -> bool:
    """Whether a file of a stack trace belongs neither to a library nor to this package."""
    if filename.startswith((*_LIBRARIES, "<", _PACKAGE)) or any(folder in filename for folder in _INSTALLED):
        return False
    return not any(filename.startswith(_installed_in(str(folder))) for folder in sys.path)


@cache
def _installed_in(folder: str) -> tuple[str, ...]:
    """Return the path prefixes of the files that `pip install --target` has put into a folder of `sys.path`.

    Each distribution's RECORD lists its files. For a folder of libraries only, such as site-packages, the
    result is empty, because `is_user_code` knows its files without it.
    """
    if folder.startswith(_LIBRARIES) or any(part in f"{folder}/" for part in _INSTALLED):
        return ()
    found = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        for line in record.read_text(encoding="utf-8", errors="replace").splitlines():
            first, slash, _ = line.partition(",")[0].partition("/")
            found.add(f"{first}{slash}")
    places = {os.path.abspath(folder), os.path.realpath(folder)}
    return tuple(f"{place}/{first}" for place in places for first in sorted(found))


def describe(error: BaseException) -> str:
    """Return the exception's type and message, and the innermost line of user code in its traceback."""
    return f"{type(error).__name__}: {error}{_where(error)}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_user_code(frame.filename):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
