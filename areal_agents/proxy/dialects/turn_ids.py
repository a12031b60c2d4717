"""The id of a turn in the form of each API, by which a client refers to it later.

A turn's own id is "chatcmpl-" and 24 hexadecimal digits, the same digits in every form.
"""

from __future__ import annotations

import re
import secrets

_TURN = "chatcmpl-"
_HANDLE = "areal-"
_WIRE = re.compile(
    r"(?:chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|ctc_|areal-)([0-9a-f]{24})(?![0-9a-f]).*", re.DOTALL
)


def new_turn_id() -> str:
    """A fresh id."""
    return _TURN + secrets.token_hex(12)


def wire_id(turn_id: str, prefix: str) -> str:
    """The id of a turn under the prefix of an API, for example "resp_"."""
    return prefix + turn_id.removeprefix(_TURN)


def handle_of(turn_id: str) -> str:
    """An opaque string that represents a turn in fields that clients replay without reading."""
    return _HANDLE + turn_id.removeprefix(_TURN)


def turn_id_of(value: object) -> str | None:
    """The turn that an id or a handle names in any of its forms, None for what is not ours."""
    match = _WIRE.fullmatch(value) if isinstance(value, str) else None
    return _TURN + match[1] if match else None
