"""The reward: whether the function that the agent left gives the right results for the cases of the task.

The cases are in no folder of the agent's. What it left runs as a program of its own, which is told the
arguments and not the results; its output is compared here.
"""

from __future__ import annotations

import json
import subprocess
import sys

from areal_agents.rewards import FinishedEpisode

TIMEOUT_S = 10.0
_PROGRAM = """
import json, sys
task = json.load(sys.stdin)
names = {}
exec(task["source"], names)
json.dump([names["pick"](values, limit) for values, limit in task["arguments"]], sys.stdout)
"""


def solved(episode: FinishedEpisode) -> float:
    """1.0 if the file of the task gives every right result, else 0.0."""
    assert episode.workdir is not None, "the agent works in a folder"
    cases = episode.task["cases"]
    try:
        source = (episode.workdir / episode.task["file"]).read_text()
    except (OSError, UnicodeDecodeError):  # removed, or no longer text
        return 0.0
    given = json.dumps({"source": source, "arguments": [case[:2] for case in cases]})
    return float(_results(given) == [result for _, _, result in cases])


def _results(given: str) -> object:
    """What the program prints, as JSON; None if it fails, prints something else, or takes too long."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            env={},
            timeout=TIMEOUT_S,
        )
        return json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        return None
