"""Files that say whether the process that made them is running: it holds a lock, which the kernel releases.

That holds however the process ends, and unlike the number of a process it cannot be that of another one, or
of one that this process does not see, because it is in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def holding(path: Path, content: str) -> Iterator[int]:
    """Make a file and hold its lock within the with-block, then remove it.

    Yields the descriptor. A child process that inherits it holds the lock too, until both have ended.

    Args:
        content: for people who inspect the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unlocked = path.with_suffix(f".{os.getpid()}.new")
    with open(unlocked, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        unlocked.rename(path)  # the file never exists under this name without its lock
        try:
            yield file.fileno()
        finally:
            path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether the process that made a file is running; not, if there is no such file."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
