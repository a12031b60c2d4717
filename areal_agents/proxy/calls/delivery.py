"""The reply as the client receives it: cut before a stop string, with only the tool calls that it accepts.

The same rule for a whole reply and for its pieces as they stream: the pieces joined are the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from areal_agents.core.messages import Message
from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.rendering import Delta


def as_asked(reply: Message, request: ModelRequest) -> Message:
    """The reply that a request gets and that is recorded as given."""
    stops = request.wish.stop
    if stops:
        reasoning, content = (_first_stop(text, stops) for text in (reply.reasoning, reply.content))
        if reasoning is not None:
            reply = replace(reply, reasoning=reply.reasoning[:reasoning], content="")
        elif content is not None:
            reply = replace(reply, content=reply.content[:content])
    return replace(reply, tool_calls=reply.tool_calls[: _most_calls(request)])


class AskedStream:
    """The pieces of a reply that its client gets."""

    def __init__(self, request: ModelRequest) -> None:
        self._reasoning = _UpToStop(request.wish.stop)
        self._content = _UpToStop(request.wish.stop)
        self._calls_left = _most_calls(request)

    def feed(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        """What of `deltas` may go out now."""
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
        """What was held back and turned out to be no stop string."""
        yield from _text("reasoning", self._reasoning.finish())
        yield from _text("content", self._content.finish())


class _UpToStop:
    """A string that ends before the first stop string in it, piece by piece."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What of the text so far can no longer be part of a stop string."""
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
        """The rest, once no more text follows."""
        held, self._held = self._held, ""
        return held


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where a string is cut: before the stop string that is complete first, as in an engine."""
    met = [(index + len(stop), index) for stop in stops if (index := text.find(stop)) >= 0]
    return min(met)[1] if met else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _text(kind: str, text: str) -> Iterator[Delta]:
    if text:
        yield Delta(kind, text)  # type: ignore[arg-type]


def _most_calls(request: ModelRequest) -> int | None:
    """How many of the reply's calls the client takes; None for all."""
    if request.calls == "none":
        return 0
    return None if request.parallel_calls else 1
