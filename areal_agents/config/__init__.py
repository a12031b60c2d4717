"""The configuration of a run: its settings, and how they are read, checked and written."""

from areal_agents.config.files import (
    is_saved,
    load_config,
    proxy_config,
    save_config,
    validate_config,
    with_overrides,
)
from areal_agents.config.tree import Config

__all__ = [
    "Config",
    "is_saved",
    "load_config",
    "proxy_config",
    "save_config",
    "validate_config",
    "with_overrides",
]
