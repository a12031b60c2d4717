"""The messages that a conversation replays at every call, read once.

An agent sends its whole history each time. What an earlier call of the conversation has read at the same
place is taken over from there, so that a call costs about as much in its hundredth turn as in its first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from areal_agents.core.messages import Message

_MOST_HISTORIES = 4
_PLAIN = {"role", "content", "name", "tool_call_id"}  # fields beside the text, of which only texts are read
_Entry = tuple[Any, str, Message]  # the raw form to compare with, what else the message depends on, and it


class MessageMemo:
    """The conversations that were read last: the branches of one episode, or those of many."""

    def __init__(self, most_histories: int = _MOST_HISTORIES) -> None:
        self._most = most_histories
        self._histories: list[list[_Entry]] = []  # the latest first

    def reading(self) -> Reading:
        """A reader of one request."""
        return Reading(self)

    def alike(self) -> list[list[_Entry]]:
        """The conversations to compare with."""
        return list(self._histories)

    def keep(self, history: list[_Entry]) -> None:
        """Keep a conversation that is being read."""
        self._histories.insert(0, history)
        del self._histories[self._most :]

    def drop(self, history: list[_Entry]) -> None:
        """Let go of a conversation that is the beginning of another one."""
        self._histories = [kept for kept in self._histories if kept is not history]


class Reading:
    """Reads the messages of one request, in their order."""

    def __init__(self, memo: MessageMemo) -> None:
        self._memo = memo
        self._alike = memo.alike()  # what began in the same way so far
        self._history: list[_Entry] = []

    def read(self, raw: Any, context: str, read: Callable[[], Message]) -> Message:
        """What `read` makes of `raw`; it may depend on nothing but `raw` and `context`."""
        index, key = len(self._history), _key(raw)
        entry: _Entry | None = None
        alike = []
        for history in self._alike:
            if index == len(history):
                self._memo.drop(history)  # all of it is in this one
            elif history[index][1] == context and history[index][0] == key:
                alike.append(history)
                entry = entry or history[index]
        self._alike = alike
        if not index:
            self._memo.keep(self._history)
        if entry is None:
            entry = (key, context, read())
        self._history.append(entry)
        return entry[2]


def _key(raw: Any) -> Any:
    """What two raw messages have in common only if they are the same.

    Equal texts are the same; equal numbers need not be, since 1 == True, so whatever holds more than a text
    is compared as JSON.
    """
    if type(raw) is dict and raw.keys() <= _PLAIN and type(raw.get("content")) is str:
        return raw
    try:
        return orjson.dumps(raw)
    except orjson.JSONEncodeError:  # nested deeper than it writes: like nothing else
        return object()
