"""Writes files atomically: readers find the previous content or the new content, never a part of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield the path of an empty file beside `path`, which takes its place at the end of the with-block.

    If the block raises, the new file is removed and `path` stays as it is.

    Args:
        private: only the owner can read the file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666))
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file atomically; see `replacing`."""
    with replacing(path, private=private) as temporary:
        temporary.write_text(text, encoding="utf-8")
