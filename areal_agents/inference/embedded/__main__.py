"""`python -m areal_agents.inference.embedded JSON` runs the embedded engine in a process of its own."""

from __future__ import annotations

import sys

from areal_agents.errors import ArealAgentsError
from areal_agents.inference.config import EmbeddedEngineConfig
from areal_agents.inference.embedded.server import serve

if __name__ == "__main__":
    try:
        serve(EmbeddedEngineConfig.model_validate_json(sys.argv[1]))
    except ArealAgentsError as error:
        sys.exit(f"error: {error}")
