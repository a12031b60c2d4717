"""The dialect of Anthropic's Messages API: reads its requests and writes its Messages.

The id of a turn goes out as the message's id, as the signature of its thinking and in the ids of its tool
calls; whichever of them the client keeps finds the recorded tokens again. Thinking is what the served
chat template does: `thinking` in a request neither starts nor stops it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic_core import PydanticSerializationError

from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.dialects.base import ReadContext, StreamWriter
from areal_agents.proxy.dialects.messages.answers import MessageStream, count_json, message
from areal_agents.proxy.dialects.messages.reading import named_turn, read_request
from areal_agents.proxy.dialects.writing import event, to_json
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
    """The dialect of `/v1/messages`. Stateless."""

    name = "messages"
    keepalive = event(b'{"type": "ping"}', "ping")

    def referenced_turn(self, body: Mapping[str, Any]) -> str | None:
        """The turn of the last assistant message that carries one of our handles."""
        return named_turn(body)

    def read(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """The canonical form of a request; see `read_request`."""
        return read_request(body, context)

    def answer(self, body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
        """The JSON of Anthropic's Message. RequestError 502 if a call's input is nested too deeply."""
        try:
            return to_json(message(body, done[0], tokenizer))
        except PydanticSerializationError as error:
            raise RequestError(
                f"the reply's tool call cannot be written: {error}", status=502, code="unwritable_reply"
            ) from error

    def stream(
        self,
        body: Mapping[str, Any],
        request: ModelRequest,
        turn_ids: Sequence[str],
        created_at: float,
        tokenizer: Tokenizer,
    ) -> StreamWriter:
        """A writer of Anthropic's events."""
        return MessageStream(body, turn_ids[0], tokenizer, self.error)

    def error(self, refusal: RequestError) -> bytes:
        """An error in Anthropic's form, which has no field for the parameter: the message names it."""
        kind = _TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": _words(refusal)}})


def read_for_counting(body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
    """The canonical form of a body of `/v1/messages/count_tokens`, where max_tokens is not needed."""
    return read_request(body, context, counting=True)


def count_answer(tokens: int) -> bytes:
    """The JSON of the answer of `/v1/messages/count_tokens`: `tokens` is the length of the prompt."""
    return count_json(tokens)


def _words(refusal: RequestError) -> str:
    details = refusal.details
    if refusal.code == "context_length_exceeded" and {"tokens", "limit"} <= details.keys():
        # Clients look for these very words to know that they must compact.
        return f"prompt is too long: {details['tokens']} tokens > {details['limit']} maximum"
    if refusal.param and not refusal.message.startswith(refusal.param):
        return f"{refusal.param}: {refusal.message}"
    return refusal.message
