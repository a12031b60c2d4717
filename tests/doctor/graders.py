"""Graders: a correct one, and one for each kind of mistake. Grader processes import no other test module."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from areal_agents.rewards import FinishedEpisode, fenced

_CALLS = itertools.count()


def exact(episode: FinishedEpisode) -> float:
    return float(episode.answer == episode.task["answer"])


def named(episode: FinishedEpisode) -> dict[str, float]:
    """Gives the reward of `exact` under a name."""
    return {"exact": exact(episode)}


def contains(episode: FinishedEpisode) -> float:
    """Accepts every reply that contains the answer, such as a list of all choices."""
    return float(episode.task["answer"] in episode.answer)


def boxed(episode: FinishedEpisode) -> float:
    """Fails on a reply without a box."""
    found = re.search(r"\\boxed\{(.*)\}", episode.answer)
    assert found is not None, "no box"
    return float(found[1] == episode.task["answer"])


def boxed_or_nothing(episode: FinishedEpisode) -> float:
    return float(f"\\boxed{{{episode.task['answer']}}}" == episode.answer)


def fenced_statement(episode: FinishedEpisode) -> float:
    """Reads a fenced block that is marked as SQL."""
    return float(f"```sql\n{episode.task['answer']}\n```" in episode.answer)


def any_fence(episode: FinishedEpisode) -> float:
    return float(fenced(episode.answer) == f"{episode.task['answer']}\n")


def by_claim(episode: FinishedEpisode) -> dict[str, float]:
    return {"answer": exact(episode), "claim": 0.3 * ("is done" in episode.answer)}


def never(episode: FinishedEpisode) -> float:
    return 0.0


def moody(episode: FinishedEpisode) -> float:
    """Gives a different reward at each call."""
    return exact(episode) + next(_CALLS) * 1e-3


async def slow_if_right(episode: FinishedEpisode) -> float:
    right = exact(episode)
    await asyncio.sleep(0.3 * right)
    return right


def endless(episode: FinishedEpisode) -> float:
    threading.Event().wait()
    return 1.0


def ends_the_process(episode: FinishedEpisode) -> float:
    """Ends its process if the answer is right, as a grader that was written as a program may do."""
    if episode.answer == episode.task["answer"]:
        print("graded", flush=True)
        os._exit(7)
    return 0.0


def tests_of_the_folder(episode: FinishedEpisode) -> float:
    """Runs the tests that the agent left in its folder."""
    assert episode.workdir is not None
    done = subprocess.run([sys.executable, "test_double.py"], cwd=episode.workdir, timeout=30, check=False)
    return float(done.returncode == 0)


def tests_of_the_task(episode: FinishedEpisode) -> float:
    """Runs the original tests of the task, even if the agent changed its copy."""
    assert episode.workdir is not None
    shutil.copy(Path(episode.task["folder"]) / "test_double.py", episode.workdir)
    return tests_of_the_folder(episode)
