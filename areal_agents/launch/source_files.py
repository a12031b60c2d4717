"""Finds the user's source files behind a function, a command or an environment, and computes their digests.

Nothing is imported: modules are found as Python would find them, and their import statements are parsed. Only
the user's files are followed, not those of libraries or of this package. Files that the code opens while it
runs, such as a prompt, are not found.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import os
import pickletools
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal_agents.user_functions import is_user_code, names_a_function

MISSING = "missing"
_LARGEST = 16 << 20  # bytes; of a larger file, the size and the time of change count
_SETS = ("FROZENSET", "ADDITEMS")  # opcodes whose items have no order
_KERNEL = re.compile(r"/ipykernel_\d+/")  # a notebook's cells are in a folder with the process id


def digests_of(named: str) -> dict[str, str]:
    """Return a digest by name for each source file behind `named`.

    Args:
        named: module:function, file.py:function, file.pkl:function, a command with its arguments, or a
            folder; one that contains the current folder is left out.
    """
    importlib.machinery.PathFinder.invalidate_caches()
    if names_a_function(named):
        return _of_target(named.rpartition(":")[0])
    try:
        words = [named] if Path(named).exists() else shlex.split(named)
    except ValueError:
        words = [named]
    found: dict[str, str] = {}
    for word in words:
        path = Path(word)
        if path.is_file() and is_user_code(str(path.resolve())) and not _is_program(path):
            found.update(_of_target(word))
        elif path.is_dir() and not Path.cwd().is_relative_to(path.resolve()):
            found.update(_of_folder(path))  # not one that has what the run itself writes, such as "."
    return found


def modules_behind(name: str) -> dict[str, str]:
    """Return the digests of a user's module and of the user's modules that it imports.

    Args:
        name: the dotted name of the module. The result is {} if there is none, or if it is a library's.
    """
    path = _found(name, [str(Path.cwd()), *sys.path])
    return _closure(path) if path is not None else {}


def _of_target(target: str) -> dict[str, str]:
    path = Path(target)
    if target.endswith(".pkl"):
        return {path.name: _of_pickle(path)}
    if target.endswith(".py"):
        return _closure(path.resolve())
    if path.is_file():
        return {path.name: _digest(path)}
    return modules_behind(target) if all(part.isidentifier() for part in target.split(".")) else {}


def _closure(first: Path) -> dict[str, str]:
    """Return the digests of a file and of the user's modules that it imports, directly or not."""
    folder, found, waiting = first.parent, dict[Path, str](), [first]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = _digest(path)
        waiting += [other for other in _imported(path, folder) if other not in found]
    return {_shown(path, folder): digest for path, digest in found.items()}


def _shown(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the import of the file reports it
        return
    places = [str(folder), str(Path.cwd()), *sys.path]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, within = [alias.name for alias in node.names], places
        elif isinstance(node, ast.ImportFrom):
            # `from package import module` and `from module import function` look the same.
            base = f"{node.module}." if node.module else ""
            names = [*([node.module] if node.module else []), *(base + alias.name for alias in node.names)]
            within = (
                places if node.level == 0 else [str(path.parents[min(node.level, len(path.parents)) - 1])]
            )
        else:
            continue
        for name in names:
            for end in range(1, name.count(".") + 2):  # the packages that contain it are imported first
                other = _found(".".join(name.split(".")[:end]), within)
                if other is not None:
                    yield other


def _found(name: str, places: Sequence[str]) -> Path | None:
    """Return the file of a user's module; None for one of a library, a namespace package, or none."""
    within, spec = places, None
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, within)
        if spec is None:
            return None
        within = spec.submodule_search_locations or []
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin).resolve()
    return path if is_user_code(str(path)) else None


def _is_program(path: Path) -> bool:
    """Whether a word of a command is a program, such as an interpreter in the user's environment."""
    if not os.access(path, os.X_OK):
        return False
    with open(path, "rb") as file:
        return b"\0" in file.read(1024)


def _of_folder(folder: Path) -> dict[str, str]:
    """Return one digest of a folder's files, without hidden ones."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in inside.parts):
            digest.update(f"{inside}\0{_digest(path)}\0".encode(errors="surrogateescape"))
    return {f"{folder.name}/": digest.hexdigest()[:16]}


def _of_pickle(path: Path) -> str:
    """Return a digest of a pickled function that does not depend on the process that pickled it.

    The digest leaves out the folder of a notebook's cells, the order of sets, and the indices of the memo,
    which depend on that order.
    """
    try:
        return _of_opcodes(path.read_bytes())
    except (OSError, ValueError, LookupError):
        return MISSING


def _of_opcodes(data: bytes) -> str:
    """Follow the opcodes of a pickle with a digest in place of each object on the stack and in the memo."""
    stack: list[str] = []
    marks: list[int] = []  # for each MARK, the length of the stack
    memo: dict[int, str] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name, takes = opcode.name, opcode.stack_before
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE" or "PUT" in name:
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif "GET" in name:
            assert argument is not None, "an opcode that reads the memo has an index"
            stack.append(memo[argument])
        elif name not in ("PROTO", "FRAME", "STOP"):
            items: list[str] = []
            if pickletools.markobject in takes:
                begin = marks.pop()
                items, takes = stack[begin:], takes[: takes.index(pickletools.markobject)]
                del stack[begin:]
            operands = stack[len(stack) - len(takes) :]
            del stack[len(stack) - len(takes) :]
            items = sorted(items) if name in _SETS else items
            text = _KERNEL.sub("/", argument) if isinstance(argument, str) else repr(argument)
            content = "\0".join((name, text, *operands, "", *items))
            digest = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
            stack += [digest] * len(opcode.stack_after)
    return stack[-1][:16]


def _digest(path: Path) -> str:
    try:
        status = path.stat()
        if status.st_size > _LARGEST:
            return f"{status.st_size} bytes, {status.st_mtime_ns}"
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return MISSING
