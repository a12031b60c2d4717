"""Runs `train` or `evaluate` for a calling process, and ends when that process ends in any way.

    python -m areal_agents.api.process train CONFIG [--fresh]

Its standard input is a pipe that only the caller holds. It exits with 0 when the run has ended, with 1 after
an error, which is then in error.txt beside the configuration, and with 130 when it was stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from areal_agents.config import load_config
from areal_agents.errors import ArealAgentsError
from areal_agents.launch import train as programs
from areal_agents.launch.signals import Interrupted
from areal_agents.launch.supervision import end_with_supervisor


def main() -> int:
    """Run the program that the arguments name; return the exit code."""
    program, path = sys.argv[1], Path(sys.argv[2])
    end_with_supervisor()
    console = Console(soft_wrap=True, highlight=False)
    try:
        config = load_config(path)
        if program == "train":
            programs.train(config, console=console, fresh="--fresh" in sys.argv[3:])
        else:
            score = programs.evaluate(config, console=console, keep=True)
            (path.parent / "score.txt").write_text(repr(score))
    except ArealAgentsError as error:
        (path.parent / "error.txt").write_text(f"{type(error).__name__}: {error}")
        return 1
    except Interrupted:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
