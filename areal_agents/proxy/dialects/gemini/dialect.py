"""The dialect of Google's Gemini API.

An answer has the id of its turn as `responseId`, and in the thought signature of its first text and of its
first call. If the client sends a signature back, the recorded tokens are found again. Whether the model
thinks depends on the chat template; `includeThoughts` says whether the client gets the thoughts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.gemini.answers import KEEPALIVE, ContentStream, content_answer, count_json
from areal_agents.proxy.dialects.gemini.reading import named_turn, read_count, read_request
from areal_agents.rendering import Tokenizer

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_TYPE = "type.googleapis.com/google.rpc."


class Gemini:
    """POST …/models/{model}:generateContent, :streamGenerateContent and :countTokens.

    See `Dialect` and `CountingDialect`.
    """

    name = "gemini"
    keepalive = KEEPALIVE

    def referenced_turn(self, body: Mapping[str, Any]) -> str | None:
        """See `Dialect.referenced_turn`; see `named_turn`."""
        return named_turn(body)

    def read(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """See `Dialect.read` and `read_request`."""
        return read_request(body, context)

    def answer(self, body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
        """See `Dialect.answer` and `content_answer`."""
        return content_answer(body, done, tokenizer)

    def stream(
        self,
        body: Mapping[str, Any],
        request: ModelRequest,
        turn_ids: Sequence[str],
        created_at: float,
        tokenizer: Tokenizer,
    ) -> ContentStream:
        """See `Dialect.stream`. The stream has events with `alt=sse`, else it is a JSON array."""
        return ContentStream(body, turn_ids, tokenizer, self.error)

    def read_for_counting(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """See `CountingDialect.read_for_counting` and `read_count`."""
        return read_count(body, context)

    def count_answer(self, tokens: int) -> bytes:
        """See `CountingDialect.count_answer`."""
        return count_json(tokens)

    def error(self, refusal: RequestError) -> bytes:
        """See `Dialect.error`. The details have the proxy's code, the invalid field, and when to retry."""
        status = _STATUSES.get(refusal.status, "INTERNAL" if refusal.status >= 500 else "INVALID_ARGUMENT")
        message = _message_of(refusal)
        details: list[dict[str, Any]] = [
            {"@type": f"{_TYPE}ErrorInfo", "reason": refusal.code.upper(), "domain": "areal-agents"}
        ]
        if refusal.param:
            details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [{"field": refusal.param}]})
        if refusal.retry_after_s is not None:
            details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{refusal.retry_after_s:g}s"})
        error = {"code": refusal.status, "message": message, "status": status, "details": details}
        return orjson.dumps({"error": error})


def _message_of(refusal: RequestError) -> str:
    details = refusal.details
    if refusal.code == "context_length_exceeded" and {"tokens", "limit"} <= details.keys():
        return (  # in the words of Google's servers, which clients search for
            f"The input token count ({details['tokens']}) exceeds the maximum number of tokens allowed "
            f"({details['limit']})."
        )
    return refusal.message
