"""Exceptions of user code in one line: what, and where in the user's own files."""

from __future__ import annotations

import sysconfig
import traceback

_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def describe(error: BaseException) -> str:
    """Type, message, and the last line of user code that the exception passed."""
    return f"{type(error).__name__}: {error}{_where(error)}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith((*_LIBRARIES, "<")) and "/areal_agents/" not in frame.filename:
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
