"""Reads and writes the URLs of Google's API, which name the model, the method and the form of a stream.

What the URL of a call says is added to its body as the fields `model`, `stream` and `alt`, none of which
Google's bodies have, so that a dialect reads a call from its body alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

_CALL = re.compile(
    r"/v1(?:alpha|beta)?/models/(?P<model>.+):(?P<method>generateContent|streamGenerateContent|countTokens)",
    re.DOTALL,
)
_VERSION = "/v1beta"
_MODEL = "{model}"
GENERATE, STREAM, COUNT = (
    f"{_VERSION}/models/{_MODEL}:{method}"
    for method in ("generateContent", "streamGenerateContent", "countTokens")
)


def endpoint_of(path: str) -> str:
    """Return the endpoint of a path without an episode's key; it has "{model}" in place of a model's name.

    The path of another API is its own endpoint.
    """
    called = _CALL.fullmatch(path) if ":" in path else None
    return path if called is None else f"{_VERSION}/models/{_MODEL}:{called['method']}"


def url_fields(path: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a call that its URL has, given without an episode's key; {} for other APIs."""
    called = _CALL.fullmatch(path) if ":" in path else None
    if called is None:
        return {}
    return {
        "model": called["model"],
        "stream": called["method"] == "streamGenerateContent",
        "alt": query.get("alt", "json"),
    }


def is_google_path(path: str) -> bool:
    """Whether a path without an episode's key belongs to Google's API, so that errors have its form."""
    return path.startswith(("/v1beta/", "/v1alpha/")) or bool(url_fields(path, {}))


def upstream_call(endpoint: str, body: Mapping[str, Any], model: str) -> tuple[str, dict[str, Any]]:
    """Return (path with query, body) of a call for a server whose base_url ends with the version.

    Args:
        endpoint: the endpoint that was called here.
        body: the body, with the fields of its URL.
        model: the model's name on that server.
    """
    if _MODEL not in endpoint:
        return endpoint.removeprefix("/v1"), {**body, "model": model}
    path = endpoint.removeprefix(_VERSION).replace(_MODEL, quote(model))
    sent = {name: value for name, value in body.items() if name not in ("model", "stream", "alt")}
    return path + ("?alt=sse" if body["alt"] == "sse" else ""), sent
