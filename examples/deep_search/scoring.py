"""Rewards of an answer, to be named by `reward:` in the configuration.

The answer is what the last reply has between <answer> and </answer>, or all of it if there is no such pair.
The expected ones are the task's `answer`, a string or a list, and its `answer_aliases`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

from areal_agents.rewards import FinishedEpisode, best_of, exact_match, gated, judge
from areal_agents.rewards import f1 as f1_of

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def answer(episode: FinishedEpisode) -> str | None:
    """Return the answer of an episode; None if it has none. Also for `eval.answer`."""
    found = _ANSWER.findall(episode.answer)
    return (found[-1] if found else episode.answer).strip() or None


def form(episode: FinishedEpisode) -> float:
    """Return 1.0 if the last reply has one answer, between its tags, else 0.0."""
    return float(len(_ANSWER.findall(episode.answer)) == 1)


def exact(episode: FinishedEpisode) -> float:
    """Return 1.0 if the answer is an expected one, else 0.0."""
    return best_of(exact_match, answer(episode), expected(episode.task))


def f1(episode: FinishedEpisode) -> float:
    """Return the best F1 of the words of the answer and of an expected one."""
    return best_of(f1_of, answer(episode), expected(episode.task))


exact_in_form = gated(form, exact)
f1_in_form = gated(form, f1)


async def judged(episode: FinishedEpisode) -> float:
    """Return the verdict of a model (JUDGE_MODEL) on an answer in the right form; others get 0.0."""
    return await gated(form, _judge(os.environ.get("JUDGE_MODEL", "gpt-5-mini")))(episode)


def expected(task: Mapping[str, Any]) -> list[str]:
    """Return the expected answers of a task."""
    given = task["answer"]
    return [*([given] if isinstance(given, str) else given), *(task.get("answer_aliases") or ())]


@cache
def _judge(model: str) -> Callable[[FinishedEpisode], Awaitable[float]]:
    return judge(
        "The last reply answers the question of the task with the meaning of one of the expected answers: "
        "1 if it does, 0 if it does not or if it gives several answers.",
        model=model,
    )
