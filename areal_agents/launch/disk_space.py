"""Checks that the disks of a run have enough free space before new groups are submitted.

The check fails early enough that running episodes, the next checkpoint and the next weights can still be
written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from areal_agents.config import Config
from areal_agents.launch.run_folder import RunFolder
from areal_agents.training.publish.config import versions_folder
from areal_agents.training.records.files import FOLDER as RECORDS

GB = 1e9


class DiskSpace:
    """The disks that a run writes to.

    Args:
        folders: the folders that the run writes to; they need not exist yet.
        kept: the folders of checkpoints, of weights and of records of tokens; each needs space for one more
            entry as large as its newest.
        min_free_gb: the free space that every disk needs in addition, in GB; 0 disables the check.
    """

    def __init__(self, folders: Iterable[Path], *, kept: Iterable[Path], min_free_gb: float) -> None:
        self._folders = tuple(folders)
        self._kept = tuple(kept)
        self._min_free = min_free_gb * GB
        self._sizes: dict[Path, int] = {}  # bytes of the newest entry of each kept folder, by path

    def shortage(self) -> str | None:
        """Return a message for the user about a disk with too little free space, or None if there is none."""
        if not self._min_free:
            return None
        needs: dict[int, tuple[Path, float]] = {}
        for folder in (*self._folders, *self._kept):
            existing = _nearest_existing(folder)
            device = os.stat(existing).st_dev
            path, need = needs.get(device, (existing, self._min_free))
            needs[device] = (path, need + (self._next_size(folder) if folder in self._kept else 0))
        for path, need in needs.values():
            free = shutil.disk_usage(path).free
            if free < need:
                return (
                    f"the disk of {path} has {free / GB:.1f} GB free, and the run needs {need / GB:.1f} GB "
                    "(store.min_free_gb, the next checkpoint, weights and records); no groups are submitted "
                    "until there is enough free space"
                )
        return None

    def _next_size(self, folder: Path) -> int:
        entries = [entry for entry in _scan(folder) if not entry.name.startswith(".")]
        if not entries:
            return 0
        newest = Path(max(entries, key=_modified).path)
        if newest not in self._sizes:
            try:
                found = sum(_size(file) for file in newest.rglob("*"))
            except FileNotFoundError:  # an old entry that is being removed was modified last
                return max((size for path, size in self._sizes.items() if path.parent == folder), default=0)
            self._sizes = {path: size for path, size in self._sizes.items() if path.parent != folder}
            self._sizes[newest] = found
        return self._sizes[newest]


def disk_space_of(config: Config, folder: RunFolder) -> DiskSpace:
    """Return the disks that a run writes to: those of its folder and of its store."""
    store = folder.store_at(config.store.url)
    elsewhere = [] if "://" in str(store) else [Path(store).absolute().parent]
    return DiskSpace(
        [folder.root, *elsewhere],
        kept=[
            folder.root / "checkpoints",
            folder.root / RECORDS,
            versions_folder(config.trainer.publish.folder, folder.root),
        ],
        min_free_gb=config.store.min_free_gb,
    )


def _nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []


def _modified(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:  # the trainer may remove old entries at the same time
        return 0.0


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return 0
