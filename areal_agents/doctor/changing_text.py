"""Finds text that an agent changes in earlier messages at every call, and proposes rules of `proxy.volatile`.

A turn without a parent is examined: if its conversation would continue a recorded one except for some parts
of messages that the policy did not write, then those parts began the new branch. They are reported only with
rules under which the conversations are the same.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from areal_agents.core.bounded_patterns import FEWEST_LITERALS, LONGEST
from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn
from areal_agents.doctor.observed import Observed
from areal_agents.doctor.report import ChangingText
from areal_agents.proxy.volatile import VolatileRule, VolatileText

_RUN = r"[0-9A-Za-z_:.+/-]"  # characters of a word, a time, a path or an id, which change as a whole
_TOKEN = re.compile(rf"{_RUN}+|.", re.DOTALL)
_LAST_RUN, _FIRST_RUN = re.compile(rf"{_RUN}*\Z"), re.compile(rf"{_RUN}*")
_CLASSES = ("[0-9]", "[0-9a-f]", "[0-9A-Za-z]", _RUN)
_LONGEST_BEFORE = 40  # characters before a change that its rule has
_MOST_TOKENS = 2_000  # of the part of a message that differs; more is another message
_MOST_COMPARED = 64  # earlier turns that a conversation is compared with


@dataclass(frozen=True, slots=True)
class _Change:
    """A part of a message that differs: the texts that end before it and begin after it, and both values."""

    before: str
    old: str
    new: str
    after: str


@dataclass(frozen=True, slots=True)
class _Edited:
    """A message that an agent sent otherwise than it was recorded, in the turn with a number from 1."""

    turn: int
    index: int
    recorded: Message
    sent: Message


def changing_texts(seen: Observed) -> list[ChangingText]:
    """Return each text whose changes began new branches, with the rule that names it."""
    numbers = {turn.id: number for number, turn in enumerate(seen.turns, 1)}
    edited = [
        _Edited(numbers[turn.id], *differing)
        for episode in (seen.given, *seen.implicit)
        for turn in episode.turns
        if turn.parent is None
        for differing in _differing(episode, turn)
    ]
    changes: dict[tuple[str, str], list[tuple[_Edited, _Change]]] = {}
    for message in edited:
        for change in _changes(message.recorded.content, message.sent.content):
            changes.setdefault((message.recorded.role, change.before), []).append((message, change))
    found: dict[str, ChangingText] = {}
    for (role, before), each in changes.items():
        values = list(dict.fromkeys(value for _, change in each for value in (change.old, change.new)))
        name = _new_name(before, found)
        found[name] = ChangingText(
            role=role,
            message=each[0][0].index,
            before=before,
            values=values,
            turns=sorted({message.turn for message, _ in each}),
            name=name,
            pattern=_pattern(before, values, each[0][1].after),
        )
    return _explaining(found, edited)


def rules_of(texts: Sequence[ChangingText]) -> dict[str, dict[str, object]]:
    """Return the value of `proxy.volatile` that names some texts."""
    return {text.name: {"pattern": text.pattern, "roles": [text.role]} for text in texts}


def _explaining(found: Mapping[str, ChangingText], edited: Sequence[_Edited]) -> list[ChangingText]:
    """Return the texts without which all edited messages of one of their turns are as they were recorded."""
    rules = VolatileText(
        {name: VolatileRule.model_validate(rule) for name, rule in rules_of(list(found.values())).items()}
    )
    unexplained = {
        message.turn
        for message in edited
        if len({m.digest for m in rules.marked((message.recorded, message.sent), client="")}) > 1
    }
    return [text for text in found.values() if not unexplained.issuperset(text.turns)]


def _differing(episode: RecordedEpisode, turn: Turn) -> list[tuple[int, Message, Message]]:
    """Return how a conversation differs from a recorded one that it would otherwise continue.

    Of several recorded ones the longest is taken. Each difference is (index, recorded message, message).
    """
    place = episode.turns.index(turn)
    best: list[tuple[int, Message, Message]] = []
    longest = 0
    for earlier in episode.turns[max(0, place - _MOST_COMPARED) : place]:
        recorded = (*episode.forest.history(earlier.id), earlier.reply)
        if not longest <= len(recorded) < len(turn.new_messages) or earlier.tools_id != turn.tools_id:
            continue
        pairs = list(zip(recorded, turn.new_messages, strict=False))
        differing = [(index, *pair) for index, pair in enumerate(pairs) if pair[0].digest != pair[1].digest]
        if all(old.role == new.role != "assistant" for _, old, new in differing):
            best, longest = differing, len(recorded)
    return best


def _changes(old: str, new: str) -> Iterator[_Change]:
    """Iterate over the parts in which two contents differ, as long as rules could name them."""
    start = len(os.path.commonprefix([old, new]))
    end = len(os.path.commonprefix([old[start:][::-1], new[start:][::-1]]))
    start -= len(_last_run(old[:start]))
    end -= len(_first_run(old[len(old) - end :]))
    tokens = [_TOKEN.findall(text[start : len(text) - end]) for text in (old, new)]
    if max(map(len, tokens)) > _MOST_TOKENS:
        return
    before, pending = old[:start], ("", "")
    matcher = difflib.SequenceMatcher(None, tokens[0], tokens[1], autojunk=False)
    opcodes = [*matcher.get_opcodes(), ("equal", len(tokens[0]), len(tokens[0]), 0, 0)]
    for position, (kind, i, j, k, m) in enumerate(opcodes):
        values = "".join(tokens[0][i:j]), "".join(tokens[1][k:m])
        is_last = position == len(opcodes) - 1
        same = values[0] + (old[len(old) - end :] if is_last else "")
        if kind != "equal":
            pending = pending[0] + values[0], pending[1] + values[1]
        elif any(pending) and (is_last or len(same) >= FEWEST_LITERALS):
            if max(map(len, pending)) <= LONGEST and len(before) >= FEWEST_LITERALS:
                yield _Change(_ending(before), *pending, after=same[:1])
            before, pending = same, ("", "")
        elif any(pending):  # too little between two changes for a rule to begin with
            pending = pending[0] + same, pending[1] + same
        else:
            before += same


def _last_run(text: str) -> str:
    found = _LAST_RUN.search(text)
    return found.group() if found else ""


def _first_run(text: str) -> str:
    found = _FIRST_RUN.match(text)
    return found.group() if found else ""


def _ending(text: str) -> str:
    """Return the end of the text before a change: its line, or more if that is too short for a rule."""
    last = text[-_LONGEST_BEFORE:]
    line = last.rpartition("\n")[2]
    return line if len(line.strip()) >= FEWEST_LITERALS else last


def _pattern(before: str, values: Sequence[str], after: str) -> str:
    """Return a regular expression of all values, with the text before them."""
    delimited = rf"[^\n{_escaped(after)}]" if after not in ("", "\n", "^", "-") else r"[^\n]"
    classes = (*_CLASSES, delimited, r"[^\n]")
    fitting = [each for each in classes if all(re.fullmatch(f"{each}*", value) for value in values)]
    return f"{_escaped(before)}{fitting[0] if fitting else _RUN}{'+' if all(values) else '*'}"


def _escaped(text: str) -> str:
    """Like `re.escape`, which would escape spaces, too."""
    return re.sub(r"[\\.^$*+?{}\[\]|()]", r"\\\g<0>", text)


def _new_name(before: str, taken: Mapping[str, object]) -> str:
    words = re.findall(r"[a-z0-9]+", before.lower())
    name = "-".join(words[-3:]) or "text"
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(each for each in numbered if each not in taken)
