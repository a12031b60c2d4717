"""Reads the messages that a conversation repeats at each call only once.

An agent sends its whole history each time. What an earlier call of the conversation has read at the same
place is taken over from there, so that a call costs about as much in its hundredth turn as in its first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from areal_agents.core.messages import Message

_MOST_HISTORIES = 4
_MOST_CHARACTERS = 4_000_000  # of a history that is kept; a longer one is read again at every call

Group = tuple[Message, ...]  # what one item of a request means


@dataclass(frozen=True, slots=True)
class History:
    """Items that were read, in the form in which they are compared, and what they mean.

    `as_json` are the indices of those compared as JSON.
    """

    items: list[Any]
    as_json: list[int]
    groups: list[Group]

    @property
    def characters(self) -> int:
        """The approximate size of the history in characters."""
        said = (message for group in self.groups for message in group)
        return sum(len(message.content) + len(message.reasoning) for message in said)


class MessageMemo:
    """The conversations that were read last: branches of one episode, or of many."""

    def __init__(self, most_histories: int = _MOST_HISTORIES) -> None:
        self._most = most_histories
        self._histories: list[History] = []  # the latest first

    def known(self, items: Sequence[Any]) -> History:
        """The first of `items` that an earlier request began with in the same way, perhaps none.

        An item's meaning may depend on the items before it, and on nothing else.
        """
        best, most = None, 0
        for history in self._histories:
            count = _shared(items, history) if len(history.items) > most else 0
            if count > most:
                best, most = history, count
        if best is None:
            return History([], [], [])
        return History(best.items[:most], [i for i in best.as_json if i < most], best.groups[:most])

    def keep(self, history: History, items: Sequence[Any]) -> None:
        """Remember what `items` mean, once the groups of all of them are in `history`.

        The conversation that it continues is not kept as well.
        """
        taken_over = len(history.items)
        if history.characters > _MOST_CHARACTERS:
            return
        self._histories = [h for h in self._histories if not _is_beginning(h, history, taken_over)]
        for index in range(len(history.items), len(items)):
            plain = _is_plain(items[index])
            history.items.append(items[index] if plain else _json(items[index]))
            if not plain:
                history.as_json.append(index)
        self._histories.insert(0, history)
        del self._histories[self._most :]


def _is_beginning(earlier: History, history: History, taken_over: int) -> bool:
    """Whether a history is all of what another one has taken over."""
    # The groups are taken over as they are, so that looking at the last says it.
    return len(earlier.items) == taken_over > 0 and earlier.groups[-1] is history.groups[taken_over - 1]


def _shared(items: Sequence[Any], history: History) -> int:
    """How many items a request and a history begin with in common."""
    count = min(len(items), len(history.items))
    ours, theirs = list(items[:count]), history.items
    for index in history.as_json:
        if index < count:
            ours[index] = _json(items[index])
    if ours == (theirs if len(theirs) == count else theirs[:count]):  # nearly always, and at the speed of C
        return count
    return next(index for index in range(count) if ours[index] != theirs[index])


def _is_plain(item: Any) -> bool:
    """Whether all that is read of an item is text, so that an equal item means the same.

    Numbers may be equal and mean another thing, since 1 == True: such items are compared as JSON.
    """
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
        return False
    calls = item.get("tool_calls")
    if not isinstance(calls, list):
        return calls is None
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return all(isinstance(f, dict) and isinstance(f.get("arguments"), str) for f in functions)


def _json(item: Any) -> Any:
    try:
        return orjson.dumps(item)
    except orjson.JSONEncodeError:  # nested deeper than it writes: like nothing else
        return object()
