"""Which package may import which, and what `import areal_agents` loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "areal_agents"
MODULES = sorted(PACKAGE.rglob("*.py"))

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "direct_http": set(),
    "lazy_imports": set(),
    "model_folder": {"errors"},
    "process_control": set(),
    "stacks": {"process_control"},
    "folders": set(),
    "lock_files": set(),
    "lru": set(),
    "whole_files": set(),
    "secret_variables": {"errors"},
    "tls": {"core", "errors"},
    "sockets": {"errors"},
    "browsers": {"errors"},
    "extras": {"errors"},
    "core": {"errors"},
    "rendering": {"core", "errors", "model_folder"},
    "inference": {
        "browsers",
        "core",
        "direct_http",
        "errors",
        "lazy_imports",
        "lru",
        "model_folder",
        "process_control",
        "secret_variables",
        "sockets",
        "tls",
    },
    "algorithms": {"core", "errors"},
    "store": {"core", "errors", "extras", "lazy_imports", "whole_files"},
    "telemetry": {"core", "errors", "extras", "version"},
    "testing": {"core", "errors", "inference", "process_control", "sockets"},
    "quickstart": set(),
    "starter": {"episode", "errors"},
    "rewards": {"direct_http", "errors", "sandbox", "whole_files"},
    "proxy": {
        "browsers",
        "core",
        "errors",
        "inference",
        "lazy_imports",
        "lock_files",
        "lru",
        "process_control",
        "rendering",
        "secret_variables",
        "sockets",
        "stacks",
        "store",
        "telemetry",
        "tls",
    },
    "episode": {"core", "errors", "client"},
    "client": {"core", "errors", "direct_http"},
    "user_functions": {"errors"},
    "sandbox": {"core", "direct_http", "errors", "folders", "process_control", "secret_variables", "tls"},
    "environments": {
        "core",
        "direct_http",
        "episode",
        "errors",
        "process_control",
        "sandbox",
        "secret_variables",
        "sockets",
        "user_functions",
    },
    "rollout": {
        "client",
        "core",
        "direct_http",
        "environments",
        "episode",
        "errors",
        "extras",
        "folders",
        "process_control",
        "rewards",
        "sandbox",
        "secret_variables",
        "store",
        "user_functions",
    },
    "object_storage": {"errors", "extras"},
    "training": {
        "algorithms",
        "core",
        "errors",
        "inference",
        "object_storage",
        "secret_variables",
        "sockets",
        "store",
        "telemetry",
        "version",
        "whole_files",
    },
    "doctor": {
        "client",
        "core",
        "direct_http",
        "errors",
        "inference",
        "lazy_imports",
        "proxy",
        "rendering",
        "rewards",
        "rollout",
        "sandbox",
        "secret_variables",
        "sockets",
        "store",
        "testing",
    },
    "health": {"direct_http", "store"},
    "skill": {"errors", "whole_files"},
    "view": {
        "browsers",
        "config",
        "core",
        "errors",
        "extras",
        "health",
        "inspection",
        "launch",
        "rendering",
        "secret_variables",
        "sockets",
        "store",
        "training",
    },
    "simulate": {"config", "errors", "launch", "store", "whole_files"},
}
# The last two are run by the Python of another environment and never imported.
MAY_IMPORT_TORCH = {
    "algorithms",
    "training",
    "inference/embedded",
    "inference/sglang/environment",
    "inference/vllm/environment",
}


def _package(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


PACKAGES = {_package(path) for path in MODULES}


@cache
def _imports(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return frozenset(names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_packages_import_only_what_they_may(path: Path) -> None:
    package = _package(path)
    if package not in ALLOWED:
        return  # config, cli, __main__, launch and cluster may import every package
    packages = {name.split(".")[1] for name in _imports(path) if name.startswith("areal_agents.")}
    assert (packages & PACKAGES) - {package} <= ALLOWED[package]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_packages_that_may_import_torch_do_so(path: Path) -> None:
    inside = str(path.relative_to(PACKAGE).parent)
    if any(inside == package or inside.startswith(package + "/") for package in MAY_IMPORT_TORCH):
        return
    assert not {name for name in _imports(path) if name.split(".")[0] in ("torch", "benchmarks")}


def test_no_modules_import_each_other() -> None:
    """Imports under TYPE_CHECKING and within functions count too."""
    paths = {_name(path): path for path in MODULES}
    TopologicalSorter({name: _imported_modules(path, set(paths)) for name, path in paths.items()}).prepare()


def _imported_modules(path: Path, known: set[str]) -> set[str]:
    """Return the modules that a file imports; a package counts only if one of its own names is imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(names & known, {node.module} if names - known else ())
    return found & known


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize(
    ("imports", "without"),
    [
        (
            "areal_agents; areal_agents.episode; areal_agents.Client",
            ("torch", "numpy", "transformers", "openai", "sqlalchemy"),
        ),
        (
            "areal_agents.config",
            ("torch", "transformers", "openai", "sqlalchemy", "aiohttp", "httpx", "rich"),
        ),
        (
            "areal_agents.cli",
            ("torch", "numpy", "transformers", "openai", "sqlalchemy", "pydantic", "aiohttp", "httpx"),
        ),
        ("areal_agents.proxy.server", ("torch", "transformers", "anthropic")),
        (
            "areal_agents.doctor.rewards.grader_worker",
            ("torch", "transformers", "openai", "sqlalchemy", "aiohttp", "starlette"),
        ),
        ("areal_agents.api.process, areal_agents.launch.train", ("torch", "transformers", "openai")),
        ("areal_agents.inspection.sources, areal_agents.launch.evaluation", ("torch", "openai", "renderers")),
    ],
)
def test_imports_of_the_processes_are_light(imports: str, without: tuple[str, ...]) -> None:
    code = f"import sys, {imports}; print([m for m in {without} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
