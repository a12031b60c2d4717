"""The arguments of a sampled tool call, as the JSON text that was sampled.

Re-serialising them would change whitespace, number forms and escapes, and with them the tokens of
any later full rendering.
"""

from __future__ import annotations

import json
import re
from typing import Any

_DECODER = json.JSONDecoder()
_WHITESPACE = re.compile(r"[ \t\n\r]*")


def arguments_text(raw: str, arguments: Any) -> str:
    """The JSON text of a call's arguments.

    Args:
        raw: the block as sampled; where it is a JSON object with a member "arguments" or
            "parameters" that equals `arguments`, that member's own text is returned.
        arguments: the parsed arguments; serialised where `raw` is in another format.
    """
    for name, text in _members(raw).items():
        if name in ("arguments", "parameters") and json.loads(text) == arguments:
            return text
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _members(raw: str) -> dict[str, str]:
    """The text of each top-level member of a JSON object; {} if `raw` is no such object."""
    members: dict[str, str] = {}
    position = _skip(raw, 0)
    if raw[position : position + 1] != "{":
        return {}
    position = _skip(raw, position + 1)
    try:
        while raw[position : position + 1] == '"':
            name, position = _DECODER.raw_decode(raw, position)
            position = _skip(raw, position)
            if raw[position : position + 1] != ":":
                return {}
            start = _skip(raw, position + 1)
            _, end = _DECODER.raw_decode(raw, start)
            members[name] = raw[start:end]
            position = _skip(raw, end)
            if raw[position : position + 1] == ",":
                position = _skip(raw, position + 1)
    except (ValueError, RecursionError):  # not JSON, or nested beyond any real call
        return {}
    return members


def _skip(text: str, position: int) -> int:
    match = _WHITESPACE.match(text, position)
    assert match is not None  # the pattern fits the empty text
    return match.end()
