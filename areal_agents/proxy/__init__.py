"""The proxy between any agent and the policy: it records exactly what the model read and wrote."""

from areal_agents.proxy.app import create_app
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.server import serve, serve_app

__all__ = ["ProxyConfig", "create_app", "serve", "serve_app"]
