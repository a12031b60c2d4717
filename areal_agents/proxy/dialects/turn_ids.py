"""Converts turn ids to the forms of each API, with which clients refer to turns later, and back.

The id of a turn is "chatcmpl-" and 24 hexadecimal digits. Every form has the same digits.
"""

from __future__ import annotations

import re
import secrets

_TURN = "chatcmpl-"
_HANDLE = "areal-"
_WIRE = re.compile(
    r"(?:chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|ctc_|gen_|areal-)([0-9a-f]{24})(?![0-9a-f]).*", re.DOTALL
)


def new_turn_id() -> str:
    """Return a new random turn id."""
    return _TURN + secrets.token_hex(12)


def wire_id(turn_id: str, prefix: str) -> str:
    """Return the id of a turn with the prefix of an API, for example "resp_"."""
    return prefix + turn_id.removeprefix(_TURN)


def handle_of(turn_id: str) -> str:
    """Return the handle of a turn, for fields that clients send back without interpreting them."""
    return _HANDLE + turn_id.removeprefix(_TURN)


def turn_id_of(value: object) -> str | None:
    """Return the turn id of an id or handle in any form, None if `value` is none of these."""
    match = _WIRE.fullmatch(value) if isinstance(value, str) else None
    return _TURN + match[1] if match else None
