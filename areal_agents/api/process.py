"""Runs `train` or `evaluate` for a calling process, and ends when that process ends in any way.

    python -m areal_agents.api.process train CONFIG [--fresh]
    python -m areal_agents.api.process evaluate CONFIG {"model": …, "out": …, "by": […]}

Its standard input is a pipe that only the caller holds. It exits with 0 when the run has ended, with 1 after
an error, which is then in error.txt beside the configuration, and with 130 when it was stopped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from areal_agents.config import load_config
from areal_agents.errors import ArealAgentsError
from areal_agents.launch.signals import Interrupted
from areal_agents.launch.supervision import end_with_supervisor
from areal_agents.process_control import collect_seldom


def main() -> int:
    """Run the program that the arguments name; return the exit code."""
    program, path = sys.argv[1], Path(sys.argv[2])
    collect_seldom()
    end_with_supervisor()
    console = Console(soft_wrap=True, highlight=False)
    try:
        config = load_config(path)
        # Each program imports what it needs alone: imports take most of the seconds until a run begins.
        if program == "train":
            from areal_agents.launch import train as programs

            programs.train(config, console=console, fresh="--fresh" in sys.argv[3:])
        else:
            from areal_agents.evaluation.policies import NamedPolicy, policy_of_run
            from areal_agents.launch.evaluation import evaluate

            given = json.loads(sys.argv[3])
            out = Path(given["out"]) if given["out"] else None
            policy = policy_of_run(given["model"]) or NamedPolicy(given["model"], Path(config.model))
            results = evaluate(config, policy, console=console, out=out, by=given["by"])
            results.write(path.parent / "results.json")
    except ArealAgentsError as error:
        (path.parent / "error.txt").write_text(f"{type(error).__name__}: {error}")
        return 1
    except Interrupted:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
