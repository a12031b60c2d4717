"""The dialect of Anthropic's Messages API.

An answer has the id of its turn as the message's id and as the signature of its thinking. If the client sends
back either of them, the recorded tokens are found again. Whether the model thinks depends on the chat
template; the field `thinking` of a request has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.dialects.base import ReadContext, StreamWriter
from areal_agents.proxy.dialects.messages.answers import MessageStream, message_answer
from areal_agents.proxy.dialects.messages.reading import named_turn, read_request
from areal_agents.proxy.dialects.writing import event
from areal_agents.rendering import Tokenizer

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Messages:
    """POST /v1/messages and /v1/messages/count_tokens; see `Dialect` and `CountingDialect`."""

    name = "messages"
    keepalive = event(b'{"type": "ping"}', "ping")

    def referenced_turn(self, body: Mapping[str, Any]) -> str | None:
        """See `Dialect.referenced_turn`; see `named_turn`."""
        return named_turn(body)

    def read(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """See `Dialect.read` and `read_request`."""
        return read_request(body, context)

    def answer(self, body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
        """See `Dialect.answer` and `message_answer`."""
        return message_answer(body, done[0], tokenizer)

    def stream(
        self,
        body: Mapping[str, Any],
        request: ModelRequest,
        turn_ids: Sequence[str],
        created_at: float,
        tokenizer: Tokenizer,
    ) -> StreamWriter:
        """See `Dialect.stream`."""
        return MessageStream(body, turn_ids[0], tokenizer, self.error)

    def read_for_counting(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """See `CountingDialect.read_for_counting`. The body has no max_tokens."""
        return read_request(body, context, counting=True)

    def count_answer(self, tokens: int) -> bytes:
        """See `CountingDialect.count_answer`. The answer is a `MessageTokensCount`."""
        return orjson.dumps({"input_tokens": tokens})

    def error(self, refusal: RequestError) -> bytes:
        """See `Dialect.error`. Anthropic's errors have no field for the parameter; the message names it."""
        kind = _TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": _message_of(refusal)}
        if "error_code" in refusal.details:
            error["details"] = refusal.details
        return orjson.dumps({"type": "error", "error": error})


def _message_of(refusal: RequestError) -> str:
    details = refusal.details
    if refusal.code == "context_length_exceeded" and {"tokens", "limit"} <= details.keys():
        # Clients search for these exact words, and then compact the conversation.
        return f"prompt is too long: {details['tokens']} tokens > {details['limit']} maximum"
    if refusal.param and not refusal.message.startswith(refusal.param):
        return f"{refusal.param}: {refusal.message}"
    return refusal.message
