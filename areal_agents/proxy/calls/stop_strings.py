"""Limits a reply to what its request allows: the text before a stop string, and the permitted tool calls.

Whole replies and streamed replies follow the same rules: the pieces of a stream add up to the whole reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from areal_agents.core.messages import Message
from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.rendering import Delta


def delivered_reply(reply: Message, request: ModelRequest) -> Message:
    """Return the reply that the client receives, which is also the one that is recorded."""
    stops = request.wish.stop
    if stops:
        reasoning, content = (_first_stop(text, stops) for text in (reply.reasoning, reply.content))
        if reasoning is not None:
            reply = replace(reply, reasoning=reply.reasoning[:reasoning], content="")
        elif content is not None:
            reply = replace(reply, content=reply.content[:content])
    calls = reply.tool_calls[: _most_calls(request)]
    return reply if len(calls) == len(reply.tool_calls) else replace(reply, tool_calls=calls)


class DeliveredStream:
    """Limits the pieces of a streamed reply as `delivered_reply` limits a whole one."""

    def __init__(self, request: ModelRequest) -> None:
        self._reasoning = _UpToStop(request.wish.stop)
        self._content = _UpToStop(request.wish.stop)
        self._calls_left = _most_calls(request)

    def feed(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        """Yield the pieces that can be sent once `deltas` have arrived."""
        for delta in deltas:
            if delta.kind == "call":
                if self._calls_left != 0:
                    self._calls_left = self._calls_left and self._calls_left - 1
                    yield delta
            elif delta.kind == "reasoning":
                yield from _text("reasoning", self._reasoning.feed(delta.text))
            elif not self._reasoning.stopped:
                yield from _text("reasoning", self._reasoning.finish())
                yield from _text("content", self._content.feed(delta.text))

    def finish(self) -> Iterator[Delta]:
        """Yield the text that was held back as the possible beginning of a stop string."""
        yield from _text("reasoning", self._reasoning.finish())
        yield from _text("content", self._content.finish())


class _UpToStop:
    """Cuts a string that arrives in pieces before the first stop string in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Add a piece, and return the text that can no longer be part of a stop string."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        if (end := _first_stop(text, self._stops)) is not None:
            self.stopped, self._held = True, ""
            return text[:end]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back; no more text follows."""
        held, self._held = self._held, ""
        return held


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the index of the stop string that is complete first, as in an engine, or None."""
    found = [(index + len(stop), index) for stop in stops if (index := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _text(kind: str, text: str) -> Iterator[Delta]:
    if text:
        yield Delta(kind, text)  # type: ignore[arg-type]


def _most_calls(request: ModelRequest) -> int | None:
    """Return the maximum number of tool calls that the client receives, None for no limit."""
    if request.calls == "none":
        return 0
    return None if request.parallel_calls else 1
