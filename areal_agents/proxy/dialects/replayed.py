"""Parsed messages of a replayed conversation: the cache of them, and the replies that they add up to.

The cache is used because an agent sends its whole history with each call.

Items that an earlier call of the same conversation has parsed at the same index are reused, so the hundredth
call of a conversation costs about as much as the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from areal_agents.core.messages import Message

_MOST_HISTORIES = 4
_MOST_REWRITTEN = 4  # consecutive bodies, after which no more beginnings are kept
_MOST_CHARACTERS = 4_000_000  # longer histories are not kept, and are parsed again at each call

Group = tuple[Message, ...]  # the messages that one item of a request is parsed into


@dataclass(slots=True)
class History:
    """Parsed items of a conversation.

    Attributes:
        items: the items in the form in which they are compared.
        as_json: the indices of the items that are compared as JSON.
        groups: the messages of each item.
        characters: the approximate size of the messages of `items` in characters.
        body: the number of the beginning of the body that the items were parsed from, see `KnownBodies`.
    """

    items: list[Any]
    as_json: list[int]
    groups: list[Group]
    characters: int = 0
    body: int | None = None

    def raw_items(self) -> list[Any]:
        """Return the items as they were parsed from a body."""
        items = list(self.items)
        for index in self.as_json:
            items[index] = orjson.loads(items[index])
        return items


class BodyItems(list[Any]):
    """The items of a request, with what is known of the body that they were parsed from.

    Attributes:
        body: the number of the body's beginning, see `KnownBodies`; None if it was not kept.
        history: the history that they begin with, if the body began with its items.
    """

    def __init__(self, items: Sequence[Any], body: int | None, history: History | None = None) -> None:
        super().__init__(items)
        self.body = body
        self.history = history


class MessageMemo:
    """The conversations that were parsed last, of one episode or of several.

    Attributes:
        rewritten_bodies: number of the latest bodies that had a known conversation in other bytes.
    """

    def __init__(self, most_histories: int = _MOST_HISTORIES) -> None:
        self._most = most_histories
        self._histories: list[History] = []  # the latest first
        self.rewritten_bodies = 0

    @property
    def expects_known_bodies(self) -> bool:
        """Whether a later body may begin with the bytes of an earlier one, as this client writes them."""
        return self.rewritten_bodies < _MOST_REWRITTEN

    @property
    def histories(self) -> Sequence[History]:
        """The conversations, the latest first."""
        return self._histories

    def known(self, items: Sequence[Any]) -> History:
        """Return the longest known beginning of `items`, which may be empty.

        The messages of an item may depend on the items before it, and on nothing else.
        """
        if isinstance(items, BodyItems) and (known := items.history) is not None:
            return History(list(known.items), list(known.as_json), list(known.groups), known.characters)
        best, most = None, 0
        for history in self._histories:
            count = _shared(items, history) if len(history.items) > most else 0
            if count > most:
                best, most = history, count
        if best is None:
            return History([], [], [])
        groups = best.groups[:most]
        characters = best.characters if most == len(best.items) else _characters(groups)
        return History(best.items[:most], [i for i in best.as_json if i < most], groups, characters)

    def keep(self, history: History, items: Sequence[Any]) -> None:
        """Keep `history`, whose groups now have the messages of all `items`.

        It replaces the history that it continues.
        """
        reused = len(history.items)
        history.characters += _characters(history.groups[reused:])
        if history.characters > _MOST_CHARACTERS:
            return
        others = [h for h in self._histories if not _is_beginning(h, history, reused)]
        if isinstance(items, BodyItems):
            history.body = items.body
            if items.history is not None:
                self.rewritten_bodies = 0
            elif len(others) < len(self._histories):
                self.rewritten_bodies += 1
        self._histories = others
        for index in range(len(history.items), len(items)):
            plain = _is_plain(items[index])
            history.items.append(items[index] if plain else _json(items[index]))
            if not plain:
                history.as_json.append(index)
        self._histories.insert(0, history)
        del self._histories[self._most :]


def _characters(groups: Sequence[Group]) -> int:
    return sum(len(message.content) + len(message.reasoning) for group in groups for message in group)


def _is_beginning(earlier: History, history: History, reused: int) -> bool:
    """Whether the first `reused` items of a history are the whole of an earlier one."""
    # Groups are reused as the same objects, so it suffices to compare the last one.
    return len(earlier.items) == reused > 0 and earlier.groups[-1] is history.groups[reused - 1]


def _shared(items: Sequence[Any], history: History) -> int:
    """Return the number of leading items that a request and a history have in common."""
    count = min(len(items), len(history.items))
    new, known = list(items[:count]), history.items
    for index in history.as_json:
        if index < count:
            new[index] = _json(items[index])
    if new == (known if len(known) == count else known[:count]):  # the usual case, and a fast comparison
        return count
    return next(index for index in range(count) if new[index] != known[index])


def _is_plain(item: Any) -> bool:
    """Whether everything that is parsed of an item is a string, so that equal items have equal messages.

    Other items are compared as JSON, because values of different types may be equal (1 == True).
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
    except orjson.JSONEncodeError:  # nested too deeply to be written, so it equals no other item
        return object()


def joined_replies(groups: Sequence[Group]) -> list[Message]:
    """Return the messages of all groups, with adjacent assistant messages joined into one reply.

    Those that name different turns belong to different replies.
    """
    out: list[Message] = []
    parts: list[Message] = []  # adjacent assistant messages, and the turn that they name
    named = ""
    for group in groups:
        for message in group:
            if message.role != "assistant":
                out += [*_reply(parts, named), message]
                parts, named = [], ""
                continue
            if named and message.handle not in ("", named):
                out += _reply(parts, named)
                parts, named = [], ""
            parts.append(message)
            named = named or message.handle
    return out + _reply(parts, named)


def _reply(parts: Sequence[Message], handle: str) -> list[Message]:
    """Join the parts of a reply into one message; return [] without parts."""
    if len(parts) < 2:
        return list(parts)
    return [
        replace(
            parts[0],
            content="".join([part.content for part in parts]),
            reasoning="".join([part.reasoning for part in parts]),
            tool_calls=tuple(call for part in parts for call in part.tool_calls),
            handle=handle,
        )
    ]
