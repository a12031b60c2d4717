"""The HTTP proxy between agents and the policy; it records the exact tokens that the model read and wrote."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_agents.proxy.app import create_app
    from areal_agents.proxy.config import ProxyConfig
    from areal_agents.proxy.server import serve, serve_app

__all__ = ["ProxyConfig", "create_app", "serve", "serve_app"]

# Imported on first use, because the supervisor of workers does not need the modules that serve requests.
_MODULE_OF = {
    "ProxyConfig": "areal_agents.proxy.config",
    "create_app": "areal_agents.proxy.app",
    "serve": "areal_agents.proxy.server",
    "serve_app": "areal_agents.proxy.server",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
