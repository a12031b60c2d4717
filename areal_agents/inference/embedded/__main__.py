"""`python -m areal_agents.inference.embedded JSON` runs the embedded engine in a process of its own.

The key of the engine comes in a variable, since every user of the machine can read command lines.
"""

from __future__ import annotations

import sys

from areal_agents.errors import ArealAgentsError
from areal_agents.process_control import collect_seldom


def main() -> None:
    """Serve as the argument says until SIGTERM."""
    collect_seldom()  # before the imports, which take most of the seconds until the engine serves
    from areal_agents.inference.config import EmbeddedEngineConfig
    from areal_agents.inference.embedded.server import serve
    from areal_agents.secret_variables import given_engine_key

    try:
        serve(EmbeddedEngineConfig.model_validate_json(sys.argv[1]), key=given_engine_key())
    except ArealAgentsError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
