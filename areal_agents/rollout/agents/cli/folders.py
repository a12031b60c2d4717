"""The two folders of an episode of a command-line agent: its home, and the copy in which it works."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from areal_agents.folders import remove_folder

logger = logging.getLogger(__name__)

HOME, WORK = "home", "work"


def copy_folder(source: Path | None, target: Path) -> None:
    """Copy a folder with its symbolic links, or create an empty one."""
    if source is None:
        target.mkdir()
    else:
        shutil.copytree(source, target, symlinks=True)


def remove_logged(folder: Path) -> None:
    """Remove a folder. A failure is logged: the episode has its result, and the run continues."""
    try:
        remove_folder(folder)
    except OSError as error:
        logger.error("the folder %s of an episode cannot be removed: %s", folder, error)
