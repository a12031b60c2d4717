"""Writes a starter project: an agent in a framework, its tasks, a configuration, a test and a README.

The files are in `files/`: a folder for each framework with the agent, and `common/` with the rest, in which
words in capitals are replaced.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import ConfigError

_FILES = Path(__file__).parent / "files"
_RENAMED = ("README.md", "config.yaml")  # files in which words are replaced


@dataclass(frozen=True, slots=True)
class Framework:
    """What differs between the projects of two frameworks.

    Attributes:
        agent: the value of the configuration key `agent`.
        file: the file of the agent.
        packages: the packages that the agent needs besides areal-agents.
        modules: one module of each of these packages.
        program: the program that runs the agent, if it is not Python.
    """

    agent: str = "agent.py:agent"
    file: str = "agent.py"
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    program: str = ""

    def missing(self) -> str | None:
        """Return what has to be installed before the agent runs; None if nothing is missing."""
        if self.program and shutil.which(self.program) is None:
            return f"{self.program}, which is not on the PATH"
        if any(importlib.util.find_spec(module) is None for module in self.modules):
            return f"pip install {' '.join(self.packages)}"
        return None


FRAMEWORKS: Mapping[str, Framework] = {
    "openai": Framework(packages=("openai",), modules=("openai",)),
    "langgraph": Framework(
        packages=("langchain", "langgraph", "langchain-openai"),
        modules=("langchain", "langgraph", "langchain_openai"),
    ),
    "openai-agents": Framework(packages=("openai-agents",), modules=("agents",)),
    "pydantic-ai": Framework(packages=("'pydantic-ai-slim[openai]'",), modules=("pydantic_ai",)),
    "anthropic": Framework(packages=("anthropic",), modules=("anthropic",)),
    "node": Framework(
        agent="{command: node agent.mjs}",
        file="agent.mjs",
        program="node",
    ),
    "command": Framework(agent="{command: python agent.py}", program="python"),
}


def create_project(folder: Path, framework: str) -> Framework:
    """Write a starter project into a new or empty folder; a failure leaves nothing behind.

    Raises:
        ConfigError: the framework is unknown, or the folder is not empty or cannot be written.
    """
    if framework not in FRAMEWORKS:
        raise ConfigError(f"unknown framework {framework!r}; known frameworks: {', '.join(FRAMEWORKS)}")
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another name")
    chosen = FRAMEWORKS[framework]
    words = {
        "AGENT_FILE": chosen.file,
        "AGENT": chosen.agent,
        "NAME": folder.name,
        "PACKAGES": " ".join(("'areal-agents[train]'", "pytest", *chosen.packages)),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            project = Path(temporary) / "project"
            project.mkdir()
            for file in (*(_FILES / "common").iterdir(), *(_FILES / framework).iterdir()):
                if file.is_file():
                    data = file.read_text()
                    for word, value in words.items() if file.name in _RENAMED else ():
                        data = data.replace(word, value)
                    (project / file.name).write_text(data)
            project.rename(folder)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error
    return chosen
