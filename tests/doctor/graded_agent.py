"""Agents that ask the model one question, and graders: a good one, and one for each way to go wrong."""

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
from typing import Any

from openai import AsyncOpenAI

from areal_agents.episode import Episode
from areal_agents.rewards import FinishedEpisode, fenced

_CALLS = itertools.count()


async def ask(task: dict[str, Any], ep: Episode) -> None:
    async with AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        await client.chat.completions.create(model="policy", messages=messages)


async def ask_and_insist(task: dict[str, Any], ep: Episode) -> float:
    """Raises when the model says nothing, and gives its own reward."""
    async with AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        reply = await client.chat.completions.create(model="policy", messages=messages)
    said = reply.choices[0].message.content
    if not said:
        raise ValueError("the model said nothing")
    return float(said == task["answer"])


async def ask_and_wait(task: dict[str, Any], ep: Episode) -> None:
    await ask(task, ep)
    await asyncio.Event().wait()


def exact(episode: FinishedEpisode) -> float:
    return float(episode.answer == episode.task["answer"])


def named(episode: FinishedEpisode) -> dict[str, float]:
    """The same under a name of its own."""
    return {"exact": exact(episode)}


def contains(episode: FinishedEpisode) -> float:
    """Finds the answer in any text that names all choices."""
    return float(episode.task["answer"] in episode.answer)


def boxed(episode: FinishedEpisode) -> float:
    """Fails on a reply without a box."""
    found = re.search(r"\\boxed\{(.*)\}", episode.answer)
    assert found is not None, "no box"
    return float(found[1] == episode.task["answer"])


def boxed_or_nothing(episode: FinishedEpisode) -> float:
    return float(f"\\boxed{{{episode.task['answer']}}}" == episode.answer)


def fenced_statement(episode: FinishedEpisode) -> float:
    """Reads a block whose fence names SQL."""
    return float(f"```sql\n{episode.task['answer']}\n```" in episode.answer)


def any_fence(episode: FinishedEpisode) -> float:
    return float(fenced(episode.answer) == f"{episode.task['answer']}\n")


def by_claim(episode: FinishedEpisode) -> dict[str, float]:
    return {"answer": exact(episode), "claim": 0.3 * ("is done" in episode.answer)}


def never(episode: FinishedEpisode) -> float:
    return 0.0


def moody(episode: FinishedEpisode) -> float:
    """Gives another reward at each call."""
    return exact(episode) + next(_CALLS) * 1e-3


async def slow(episode: FinishedEpisode) -> float:
    await asyncio.sleep(0.3)
    return exact(episode)


def endless(episode: FinishedEpisode) -> float:
    threading.Event().wait()
    return 1.0


def ends_the_process(episode: FinishedEpisode) -> float:
    """Ends its process on the right answer, as a grader that was a program may do."""
    if episode.answer == episode.task["answer"]:
        print("graded", flush=True)
        os._exit(7)
    return 0.0


def tests_of_the_folder(episode: FinishedEpisode) -> float:
    """Runs the tests that the agent left."""
    assert episode.workdir is not None
    done = subprocess.run([sys.executable, "test_double.py"], cwd=episode.workdir, timeout=30, check=False)
    return float(done.returncode == 0)


def tests_of_the_task(episode: FinishedEpisode) -> float:
    """Runs the tests of the task, whatever the agent made of its copy."""
    assert episode.workdir is not None
    shutil.copy(Path(episode.task["folder"]) / "test_double.py", episode.workdir)
    return tests_of_the_folder(episode)
