"""Players: policies that do none of the work of a task, and one that knows its answer.

A player is a script for the scripted engine, made for one task. All but `tools` answer in text and never call
a tool, so that what they earn is earned without one.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_agents.core.rollout import Task
from areal_agents.doctor.scripted_model import ScriptedModel
from areal_agents.rendering import ChatRenderer
from areal_agents.testing import Script, ScriptedReply

ANSWER_FIELDS = (
    "answer", "expected_answer", "expected", "ground_truth", "gold", "target", "solution", "label",
    "reference",
)  # fmt: skip
GUESSES = ("0", "yes", "A")  # of some tasks the answers, and what a policy falls back to
# How an answer may have to be written, the plain answer first; %s is the answer.
ANSWER_FORMS = ("%s", "<answer>%s</answer>", "\\boxed{%s}", "#### %s", "The answer is: %s")
# How a prompt may ask for a fenced block in words; "fence" alone is also a part of "defence".
FENCE_SAID = ("fenced", "code fence", "code block", "backtick")
_SQL = re.compile(
    r"(select|with|insert|update|delete|create|alter|drop|values|pragma|explain)\b", re.IGNORECASE
)
_ANSWERS_READ = 100  # most answers that are examined for the language that they are written in
TRUNCATED_TOKENS = 32  # limit of the replies of the player whose replies are cut off
_FILLER = "Let me think about this step by step, and look at every part of the question again. " * 40


@dataclass(frozen=True, slots=True)
class Player:
    """A policy that plays every task in the same way.

    Attributes:
        what: what it does, as the rest of a sentence that begins with its name.
        script: returns the script for a task, or None if it cannot play the task.
        knows: whether it knows the answers of the tasks.
        guesses: whether it gives an answer that is right for some tasks.
        max_tokens: the limit of its replies in tokens, which cuts them off; None: that of the run.
        marks: the texts that it puts around the answer.
        said: other texts by which a prompt names its form; one of them suffices, in capitals or not.
        edits_tests: whether it plays with an agent that changes the tests in the task's folder.
    """

    name: str
    what: str
    script: Callable[[Task], Script | None]
    knows: bool = False
    guesses: bool = False
    max_tokens: int | None = None
    marks: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    edits_tests: bool = False


def players_for(
    tasks: Sequence[Task], answer_field: str | None, renderer: ChatRenderer, *, has_workdir: bool = False
) -> Iterator[Player]:
    """Yield the players for a data set; without known answers, none that needs them.

    Args:
        answer_field: the field of a task that holds its answer; None: the first of ANSWER_FIELDS that it has.
        renderer: renders the calls of tools.
        has_workdir: whether the agent works in a copy of a task's folder.
    """
    answers = [known for task in tasks if (known := answer_of(task, answer_field)) is not None]
    yield Player("empty", "answers with nothing", lambda _: _say(""))
    yield Player("constant", "always answers 'I do not know.'", lambda _: _say("I do not know."))
    for text in GUESSES:
        script = partial(_say_always, text)
        yield Player(f"“{text}”", "always gives this answer", script, guesses=True)
    yield Player(
        "echo", "repeats the longest string of the task", lambda task: _say(_longest(task, answer_field))
    )
    yield Player(
        "tool-less",
        "claims success and calls no tool",
        lambda _: _say("I have checked everything carefully. The task is done, and all tests pass."),
    )
    yield Player(
        "truncated",
        "is cut off before it answers",
        lambda _: _say(_FILLER),
        max_tokens=TRUNCATED_TOKENS,
    )
    yield Player(
        "tools", "calls the tools with made-up arguments, then answers", lambda _: ScriptedModel(renderer)
    )
    if has_workdir:
        yield Player(
            "test editor",
            "changes the tests in the task's folder, and does nothing else",
            lambda _: _say("Done."),
            edits_tests=True,
        )
    if not answers:
        return
    ((common, count),) = Counter(answers).most_common(1)
    if 1 < count < len(answers):
        what = f"always gives the most frequent answer, {common!r:.40}"
        yield Player("frequent", what, lambda _: _say(common), guesses=True)
    for form in ANSWER_FORMS:
        is_plain = form == "%s"
        yield Player(
            "right answer" if is_plain else form % "…",
            "gives the right answer" if is_plain else "gives the right answer in this form",
            lambda task, form=form: _say_answer(answer_of(task, answer_field), form),  # type: ignore[misc]
            knows=True,
            marks=tuple(filter(None, map(str.strip, form.split("%s")))),
        )
    for language in _languages(answers[:_ANSWERS_READ]):
        form = f"```{language}\n%s\n```"
        yield Player(
            f"a fenced {language} block" if language else "a fenced block",
            "gives the right answer in this form",
            lambda task, form=form: _say_answer(answer_of(task, answer_field), form),  # type: ignore[misc]
            knows=True,
            marks=(f"```{language}",),
            said=FENCE_SAID,
        )


def _languages(answers: Sequence[str]) -> Iterator[str]:
    """Yield the languages that a fence around such answers may name, first none."""
    yield ""
    for language, fits in (("json", _is_json), ("python", _is_python), ("sql", _is_sql)):
        if any(map(fits, answers)):
            yield language


def _is_json(answer: str) -> bool:
    try:
        return isinstance(json.loads(answer), dict | list)
    except (ValueError, RecursionError):
        return False


def _is_python(answer: str) -> bool:
    """Whether an answer is a program of Python and not only a word or a number, which are expressions too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the compiler are about the answer
            statements = ast.parse(answer).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(s, ast.Expr) or isinstance(s.value, ast.Call) for s in statements)


def _is_sql(answer: str) -> bool:
    return _SQL.match(answer.lstrip()) is not None


def answer_of(task: Task, field: str | None) -> str | None:
    """Return the answer that a task holds, as text; None if it holds none."""
    for name in (field,) if field else ANSWER_FIELDS:
        value = task.input.get(name)
        if isinstance(value, list) and value:
            value = value[0]  # one of several that are accepted
        if value is not None and value != "":
            return value if isinstance(value, str) else json.dumps(value)
    return None


def _say(text: str) -> Script:
    return lambda _: ScriptedReply(text)


def _say_always(text: str, _: Task) -> Script:
    return _say(text)


def _say_answer(answer: str | None, form: str) -> Script | None:
    return None if answer is None else _say(form % answer)


def _longest(task: Task, answer_field: str | None) -> str:
    """Return the longest string of a task that is not its answer."""
    answers = {answer_field, *ANSWER_FIELDS}
    shown = {name: value for name, value in task.input.items() if name not in answers}
    return max(_strings(shown), key=len, default="")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)
