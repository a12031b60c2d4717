"""Thought signatures, in which an answer carries the handle of its turn.

Clients send a signature back without interpreting it. In Google's API it has bytes, in base64; some clients
decode it and encode it again, with either alphabet.
"""

from __future__ import annotations

import base64
import binascii

from areal_agents.proxy.dialects.turn_ids import handle_of, turn_id_of

_LONGEST = 200  # those of other servers have thousands of characters


def signature_of(turn_id: str) -> str:
    """Return the signature that names a turn."""
    return base64.b64encode(handle_of(turn_id).encode()).decode()


def turn_of_signature(value: object) -> str | None:
    """Return the turn that a signature names, None if it is none of ours."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        return None
    try:
        return turn_id_of(base64.urlsafe_b64decode(value.translate({43: "-", 47: "_"})).decode())
    except (binascii.Error, ValueError):
        return None
