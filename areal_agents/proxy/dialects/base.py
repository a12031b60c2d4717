"""The interface of a dialect, which parses request bodies and writes answers, streams and errors of one API.

A dialect keeps no state between calls. Earlier responses that a call refers to are found in the episode's
forest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_agents.core.forest import Forest
from areal_agents.core.messages import ToolCall
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.dialects.replayed import MessageMemo
from areal_agents.rendering import Tokenizer


@dataclass(frozen=True, slots=True)
class ReadContext:
    """What a dialect needs besides the body to read a request.

    Attributes:
        max_messages: maximum number of messages (or input items) of one request.
        label: label of the caller, from the headers.
        forest: the recorded turns of the caller's episode, for references to earlier responses.
        memo: conversations that were read earlier.
    """

    max_messages: int
    label: str
    forest: Forest
    memo: MessageMemo = field(default_factory=MessageMemo)


class StreamWriter(Protocol):
    """Writes one streamed answer. Each method returns the events to send, or b"".

    `start` is called once, then the deltas, then `finish` or `error` once. `choice` is the index of the
    reply, 0 unless several were requested. The deltas of a choice add up to the reply's reasoning and
    content. A tool call arrives complete; text may follow it.

    Attributes:
        media_type: the Content-Type of the stream.
    """

    media_type: str

    def start(self) -> bytes:
        """Return the events that begin the stream."""
        ...

    def reasoning(self, choice: int, text: str) -> bytes:
        """Return the events for the next piece of reasoning, which is not empty."""
        ...

    def content(self, choice: int, text: str) -> bytes:
        """Return the events for the next piece of content, which is not empty."""
        ...

    def call(self, choice: int, call: ToolCall) -> bytes:
        """Return the events for one complete tool call."""
        ...

    def finish(self, done: Sequence[CompletedTurn]) -> bytes:
        """Return the events that end the stream. `done` has the recorded turn of each choice."""
        ...

    def error(self, refusal: RequestError) -> bytes:
        """Return the events that end the stream if the call fails after `start`."""
        ...


class Dialect(Protocol):
    """One API. Of a body, the URL's fields are part if the API has any (see `url_fields`).

    Attributes:
        name: name of the API in logs and metrics.
        keepalive: the data sent at intervals on a stream that has no other data to send.
    """

    name: str
    keepalive: bytes

    def referenced_turn(self, body: Mapping[str, Any]) -> str | None:
        """Return the id of a recorded turn that the body refers to, or None; used without an episode key."""
        ...

    def read(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """Return the canonical form of a request. Raise RequestError, which names the invalid field."""
        ...

    def answer(self, body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
        """Return the JSON of an answer that is not streamed; `done` has one turn per choice."""
        ...

    def stream(
        self,
        body: Mapping[str, Any],
        request: ModelRequest,
        turn_ids: Sequence[str],
        created_at: float,
        tokenizer: Tokenizer,
    ) -> StreamWriter:
        """Return a writer of the streamed answer. `turn_ids` has the id of each choice's future turn."""
        ...

    def error(self, refusal: RequestError) -> bytes:
        """Return the JSON body of an error."""
        ...


class CountingDialect(Dialect, Protocol):
    """An API that also has a request for the length of a prompt."""

    def read_for_counting(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """Return the canonical form of a request for a length. Raise RequestError as `read` does."""
        ...

    def count_answer(self, tokens: int) -> bytes:
        """Return the JSON of the answer; `tokens` is the length of the prompt."""
        ...
