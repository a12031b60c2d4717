"""What the dialects write alike: typed values, server-sent events, OpenAI's form of an error."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from areal_agents.errors import RequestError

M = TypeVar("M", bound=BaseModel)

_set = object.__setattr__  # a model's own would look at every name
DONE = b"data: [DONE]\n\n"
COMMENT = b": keepalive\n\n"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def typed(kind: type[M], **fields: Any) -> M:
    """An object of `openai.types` or `anthropic.types`, of values that are known to fit.

    Only what is given is set, as `to_json` writes it: `model_construct` would look up every default, at
    several times the cost, and that of the SDKs walks every type again.
    """
    set_fields = set(fields)
    extra = {name: fields.pop(name) for name in set_fields - kind.__pydantic_fields__.keys()}
    made = kind.__new__(kind)
    _set(made, "__dict__", fields)
    _set(made, "__pydantic_fields_set__", set_fields)
    _set(made, "__pydantic_extra__", extra)
    _set(made, "__pydantic_private__", None)
    return made


def to_json(value: BaseModel) -> bytes:
    """The JSON of an object that `typed` made: the fields that were set, and no others."""
    # A field of several types would warn of every one that the value is not, and keep each warning for ever.
    return value.__pydantic_serializer__.to_json(value, exclude_unset=True, warnings=False)


def event(data: bytes, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def model_name(body: Any) -> str:
    """The model that the client asked for, by whatever name."""
    name = body.get("model")
    return name if isinstance(name, str) and name else "policy"


def openai_error(refusal: RequestError) -> bytes:
    """An error in OpenAI's form."""
    kind = _TYPES.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    body = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return orjson.dumps({"error": body})
