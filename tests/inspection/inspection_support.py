"""Helpers that the tests of this folder share: a proxy of tests/proxy, and the episodes in its store."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

from proxy_support import MODEL, SEARCH, RunningProxy, running_proxy, tool_call  # noqa: E402

__all__ = ["MODEL", "SEARCH", "Recorded", "RunningProxy", "running_proxy", "tool_call"]


@dataclass
class Recorded:
    """The proxy, its store, and the ids of its episodes."""

    proxy: RunningProxy
    store: Path
    branching: str
    failed: str
    evaluated: str
