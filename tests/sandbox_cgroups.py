"""Finds the cgroups of sandboxes."""

from __future__ import annotations

import os
from pathlib import Path

from areal_agents.sandbox.home import PREFIX


def cgroups_of(owner: str) -> list[Path]:
    """Return the cgroups of the sandboxes of an owner, given the name of its folder.

    `os.walk` ignores cgroups that other processes remove in the meantime.
    """
    return [
        Path(parent) / name
        for parent, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(f"{PREFIX}{owner}-")
    ]
