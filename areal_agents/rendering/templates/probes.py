"""Conversations that test whether a chat template changes what it has already written.

At least one of them detects a template that numbers turns, looks at the last user message, drops reasoning,
writes the time, moves the system prompt or the tools, or keeps only the latest messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agents.rendering.templates.markup import MARK, function_call

Messages = list[dict[str, Any]]
Shape = tuple[tuple[str, int], ...]  # (role, how many in a row), the number capped by `_CAPS`

_CAPS = {"tool": 3, "user": 2, "system": 2}
_LONG = 24  # questions in the longest conversation


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """A reply of a probe and the texts that its rendering must contain for nothing to be lost."""

    message: dict[str, Any]
    said: tuple[str, ...]


def shape_of(messages: Sequence[dict[str, Any]]) -> Shape:
    """The roles of messages with the lengths of their runs; a long run counts as the longest probed."""
    runs: list[tuple[str, int]] = []
    for message in messages:
        role = message["role"]
        if runs and runs[-1][0] == role:
            runs[-1] = (role, min(runs[-1][1] + 1, _CAPS.get(role, 1)))
        else:
            runs.append((role, 1))
    return tuple(runs)


def extensions() -> Iterator[Messages]:
    """Messages that may follow a reply, one list for each shape that is probed."""
    for tools in (1, 2, 3):
        results = [_result(i) for i in range(tools)]
        yield results
        yield [*results, _user("And now?\n")]
        yield [*results, _system("Mind the time.")]
    yield [_user("  Go on. ")]
    yield [_user("One more."), _user("<tool_response>\nnone\n</tool_response>")]
    yield [_system("Be brief.")]
    yield [_system("Be brief."), _user("Go on.")]
    yield [_user("Go on."), _system("Be brief.")]


def histories() -> list[Messages]:
    """Conversations that end before a reply; the first two are the shortest."""
    rounds = [m for i in range(_LONG) for m in (_user(f"Question {i}?"), _said(f"Answer {i}."))]
    return [
        [_user("Where is Lyon?")],
        [_system("Answer."), _user("  Where is Lyon?\n")],
        [_user("Hello"), _said("Hi."), _user("Where is Lyon?")],
        [_user("Where is Lyon?"), _called(1, ""), _result(0)],
        [_system("Answer."), _user("Where?"), _called(1, "I look."), _result(0)],
        [_system("Answer."), _user("Hello"), _said("Hi."), _user("Where?"), _called(1, ""), _result(0)],
        [
            *(_user("Compare."), _called(2, "", "Two searches."), _result(0), _result(1)),
            *(_said("They differ.", "Easy."), _user("Sure?"), _called(1, "Once more."), _result(0)),
        ],
        [_system("Answer."), *rounds, _user("Last one?")],
    ]


def replies(*, calls: int, reasoning: bool) -> list[ProbeReply]:
    """Replies with `calls` tool calls that end in `MARK`; if `reasoning`, each also with reasoning."""
    made = [_marked_calls(calls), _marked_calls(calls, "I look it up.")] if calls else []
    plain = [] if calls else [_marked("I think that "), _marked("Well:\n\n  - a <b> & c\n\n")]
    without = [*made, *plain]
    if not reasoning:
        return without
    thought = "It is in France."
    return without + [
        ProbeReply({**reply.message, "reasoning_content": thought}, (thought, *reply.said))
        for reply in without
    ]


def stand_in(head: Sequence[Any], new_messages: Sequence[dict[str, Any]], *, called: bool) -> Messages:
    """A short conversation that ends with a reply and can precede `new_messages`.

    If `called`, the reply has one call for each tool result at the start of `new_messages`, with the ids that
    those results name, and at least one call.
    """
    question = [*head, _user("Question.")]
    if not called:
        return [*question, _said(MARK)]
    ids = []
    for message in new_messages:
        if message["role"] != "tool":
            break
        ids.append(message.get("tool_call_id") or "call00000")
    calls = [function_call(call_id, "lookup", {"key": "a"}) for call_id in ids[:-1]]
    calls.append(function_call(ids[-1] if ids else "call00000", "lookup", {"key": MARK}))
    return [*question, {"role": "assistant", "content": "", "tool_calls": calls}]


def probe_tools() -> Messages:
    """Two function tools."""
    query = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    return [
        {"type": "function", "function": {"name": name, "description": text, "parameters": query}}
        for name, text in (("search", "Search the corpus."), ("open_page", 'Open a "page".'))
    ]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _said(text: str, reasoning: str = "") -> dict[str, Any]:
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return {"role": "assistant", "content": text, **thought}


def _called(calls: int, text: str, reasoning: str = "") -> dict[str, Any]:
    made = [function_call(_call_id(i), "search", {"query": f"Lyon {i}"}) for i in range(calls)]
    return {**_said(text, reasoning), "tool_calls": made}


def _result(index: int) -> dict[str, Any]:
    return {"role": "tool", "content": f'{{"found": {index}}}\n', "tool_call_id": _call_id(index)}


def _call_id(index: int) -> str:
    return f"call{index:05d}"  # some templates require nine characters


def _marked(text: str) -> ProbeReply:
    return ProbeReply(_said(text + MARK), ((text + MARK).strip(),))


def _marked_calls(calls: int, text: str = "") -> ProbeReply:
    names = [f"open_page{i}" for i in range(calls)]
    keys = [f"page {i}" for i in range(calls - 1)] + [MARK]
    pairs = list(enumerate(zip(names, keys, strict=True)))
    made = [function_call(_call_id(i), name, {"key": key, "n": i}) for i, (name, key) in pairs]
    said = (text, *names, *keys)
    return ProbeReply({**_said(text), "tool_calls": made}, tuple(part for part in said if part))
