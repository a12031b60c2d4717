"""Splits the path of a request into the key of an episode and the path that the key is a prefix of."""

from __future__ import annotations

_PREFIX = "/e/"


def split_path(path: str) -> tuple[str | None, str]:
    """Return (key, path without the key); the key is None if the path names no episode."""
    if not path.startswith(_PREFIX):
        return None, path
    key, _, rest = path[len(_PREFIX) :].partition("/")
    return key, f"/{rest}"
