"""Writing functions that dialects share: server-sent events, OpenAI's errors, and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from areal_agents.core.completion import Completion
from areal_agents.errors import RequestError
from areal_agents.rendering import Tokenizer

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
COMMENT = b": keepalive\n\n"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def event(data: bytes, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def model_name(body: Any) -> str:
    """Return the name of the model in a request, or "policy"."""
    name = body.get("model")
    return name if isinstance(name, str) and name else "policy"


def openai_error(refusal: RequestError) -> bytes:
    """Return an error in OpenAI's form."""
    kind = _TYPES.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    body = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return orjson.dumps({"error": body})


class TokenTexts:
    """The texts of the tokens of one answer.

    Each distinct token is decoded once: with 20 alternatives per token, a long reply lists tens of thousands
    of tokens, most of them repeatedly.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token_id: int) -> str:
        """Return the text of a token; a part of a character is decoded to a replacement character."""
        return self._of(token_id)[0]

    def entries(self, completion: Completion) -> list[dict[str, Any]]:
        """Return an entry [C] for each sampled token, in OpenAI's form.

        An entry has `token`, `logprob`, `bytes` and `top_logprobs`, the list of the requested alternatives.
        """
        best = completion.top_logprobs or ((),) * len(completion)
        ids, values = completion.token_ids.tolist(), completion.behavior_logprobs.tolist()
        for token_id in {*ids, *(token_id for pairs in best for token_id, _ in pairs)}:
            self._of(token_id)
        return [
            self._entries([(token_id, logprob)])[0] | {"top_logprobs": self._entries(pairs)}
            for token_id, logprob, pairs in zip(ids, values, best, strict=True)
        ]

    def _entries(self, pairs: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        known = self._known
        return [
            {"token": (token := known[token_id])[0], "logprob": logprob, "bytes": token[1]}
            for token_id, logprob in pairs
        ]

    def _of(self, token_id: int) -> tuple[str, list[int]]:
        known = self._known.get(token_id)
        if known is None:
            text = self._tokenizer.decode([token_id])
            known = self._known[token_id] = (text, list(text.encode()))
        return known
