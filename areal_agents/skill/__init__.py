"""SKILL.md teaches a coding agent to set this package up in a repository of its user; `skill` installs it."""

from __future__ import annotations

from pathlib import Path

from areal_agents.errors import ConfigError
from areal_agents.whole_files import write_whole

SKILL = Path(__file__).parent / "SKILL.md"
NAME = "train-agent-with-areal-agents"


def install(root: Path, *, folder: str, replace: bool = False) -> Path:
    """Write the skill below the root of a repository, and return its path.

    Args:
        folder: the folder of skills that the user's coding agent reads, below the root.
        replace: whether a file that is already there, and differs, is replaced.

    Raises:
        ConfigError: there is no such repository, or another file is there.
    """
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}")
    path, text = root / folder / NAME / "SKILL.md", SKILL.read_text(encoding="utf-8")
    if path.exists() and path.read_text(encoding="utf-8") != text and not replace:
        raise ConfigError(f"{path} exists and differs; give --replace to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path
