"""The `areal-agents` command, also as `python -m areal_agents`."""

from __future__ import annotations

import sys

from areal_agents.extras import install_command_of


def main() -> None:
    """Run the command line; a module that is missing is reported with the extra that has it."""
    try:
        from areal_agents.cli import main as run

        run()
    except ModuleNotFoundError as error:
        command = install_command_of(sys.argv[1:], error.name)
        if command is None:
            raise
        print(f"{error.name} is not installed; this command needs it: {command}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # while modules are imported; a command that runs ends its processes itself
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
