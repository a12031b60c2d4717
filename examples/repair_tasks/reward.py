"""The reward: whether the function that the agent left gives the right results for the cases of the task.

The cases are in no folder of the agent's. What it left runs as a program of its own, which is told the
arguments and not the results; its output is compared here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from areal_agents.rewards import FinishedEpisode
from areal_agents.rewards.code import CodeTest, ProgramRunner

TIMEOUT_S = 10.0
MOST_BYTES = 1 << 16  # of the file that the agent left, and of what its program prints
_PROGRAM = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_FSIZE, ({MOST_BYTES}, {MOST_BYTES}))
task = json.load(sys.stdin)
names = {{}}
exec(task["source"], names)
json.dump([names["pick"](values, limit) for values, limit in task["arguments"]], sys.stdout)
"""
_IN_BUBBLEWRAP = ProgramRunner(time_s=TIMEOUT_S, memory_mb=1024, isolation="bubblewrap")


async def solved_in_bubblewrap(episode: FinishedEpisode) -> float:
    """`solved`, with the program in a sandbox that shows it nothing else of this machine.

    For a model that could look for the right results. Raises RewardError if bubblewrap cannot be started.
    """
    assert episode.workdir is not None, "the agent works in a folder"
    source = _source(episode.workdir / episode.task["file"])
    if source is None:
        return 0.0
    tests = [
        CodeTest(f"{json.dumps(values)}\n{json.dumps(limit)}", json.dumps(result), "pick")
        for values, limit, result in episode.task["cases"]
    ]
    runs = await _IN_BUBBLEWRAP.run(source, tests, until_failure=True)
    return float(len(runs) == len(tests) and all(run.passed for run in runs))


def solved(episode: FinishedEpisode) -> float:
    """1.0 if the file of the task gives every right result, else 0.0, whatever the agent left."""
    assert episode.workdir is not None, "the agent works in a folder"
    cases = episode.task["cases"]
    source = _source(episode.workdir / episode.task["file"])
    if source is None:
        return 0.0
    given = json.dumps({"source": source, "arguments": [case[:2] for case in cases]})
    return float(_results(given) == [result for _, _, result in cases])


def _source(path: Path) -> str | None:
    """The file that the agent left; None if there is none, or a link, a pipe, a long file or no text."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _results(given: str) -> object:
    """What the program prints, as JSON; None if it fails, prints something else, or takes too long."""
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(given.encode(), timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        text = printed.read()
    try:
        return json.loads(text) if process.returncode == 0 else None
    except (ValueError, RecursionError):  # no JSON, or JSON that Python does not read
        return None
