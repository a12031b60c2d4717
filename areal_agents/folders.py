"""Removes folders in which programs have worked that are not trusted to leave them removable."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, if it exists.

    Permissions do not protect what is in it: a program may have taken them from its own folders, and overlay
    mounts make folders without any.

    Raises:
        OSError: something in it cannot be removed.
    """
    if not folder.exists():
        return
    folder.chmod(0o700)
    for path, names, _ in os.walk(folder):
        for name in names:
            if not (inner := Path(path) / name).is_symlink():
                inner.chmod(0o700)
    shutil.rmtree(folder)
