"""The interface of a dialect: reads a raw body, and writes answers, streams and errors in the client's form.

A dialect keeps no state between calls: whatever a later call refers to is found in the episode's forest.
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
    """What a dialect may look at while it reads a request.

    Attributes:
        max_messages: most messages (or input items) of one request.
        label: who calls, from the headers.
        forest: the recorded turns of the caller's episode, for references to earlier responses.
        memo: messages of the same conversation that were read before.
    """

    max_messages: int
    label: str
    forest: Forest
    memo: MessageMemo = field(default_factory=MessageMemo)


class StreamWriter(Protocol):
    """Writes one streamed answer; every method returns the server-sent events to send, perhaps none.

    Called in order: `start` once; then deltas; then `finish` or `error` once. `choice` is the index of the
    reply, 0 unless several were requested. The texts of the deltas of a choice, joined, are the reply's
    reasoning and content exactly. Calls come complete; text may still follow one, though it seldom does.
    """

    def start(self) -> bytes:
        """What opens the stream."""
        ...

    def reasoning(self, choice: int, text: str) -> bytes:
        """The next piece of reasoning; never empty."""
        ...

    def content(self, choice: int, text: str) -> bytes:
        """The next piece of content; never empty."""
        ...

    def call(self, choice: int, call: ToolCall) -> bytes:
        """One complete tool call."""
        ...

    def finish(self, done: Sequence[CompletedTurn]) -> bytes:
        """Everything that ends the stream, once the turns are recorded; one per choice, in order."""
        ...

    def error(self, refusal: RequestError) -> bytes:
        """What ends the stream if the call fails after it was opened."""
        ...


class Dialect(Protocol):
    """One API. `name` is its path's last part in words, for logs and metrics.

    `keepalive` is what is sent while a stream has nothing to say.
    """

    name: str
    keepalive: bytes

    def referenced_turn(self, body: Mapping[str, Any]) -> str | None:
        """The id of a recorded turn that the body names, for a caller without an episode key."""
        ...

    def read(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """The canonical form of a request. RequestError names the field that is at fault."""
        ...

    def answer(self, body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
        """The JSON of the whole answer; one completed turn per choice."""
        ...

    def stream(
        self,
        body: Mapping[str, Any],
        request: ModelRequest,
        turn_ids: Sequence[str],
        created_at: float,
        tokenizer: Tokenizer,
    ) -> StreamWriter:
        """A writer of the streamed answer. `turn_ids` has the id that each choice's turn will have."""
        ...

    def error(self, refusal: RequestError) -> bytes:
        """The JSON body of an error."""
        ...
