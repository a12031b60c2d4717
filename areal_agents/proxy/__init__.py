"""The HTTP proxy between agents and the policy; it records the exact tokens that the model read and wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_agents.lazy_imports import on_first_use

if TYPE_CHECKING:
    from areal_agents.proxy.app import create_app
    from areal_agents.proxy.config import ProxyConfig
    from areal_agents.proxy.server import serve, serve_app

__all__ = ["ProxyConfig", "create_app", "serve", "serve_app"]

# The supervisor of workers does not need the modules that serve requests.
__getattr__ = on_first_use(
    __name__, {"app": ("create_app",), "config": ("ProxyConfig",), "server": ("serve", "serve_app")}
)
