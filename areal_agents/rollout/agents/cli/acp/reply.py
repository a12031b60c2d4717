"""What an agent did in a turn of the Agent Client Protocol, and how its permission requests are answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class AcpToolCall:
    """A tool call of an agent, as the agent describes it.

    Attributes:
        id: the agent's id of it.
        title: what the agent shows its user, such as a command.
        kind: "read", "edit", "execute" or another kind of the protocol; "" if the agent does not say.
        status: "pending", "in_progress", "completed" or "failed"; "" if the agent does not say.
        input: the arguments, if the agent gives them.
        allowed: the answer to its permission request; None if it made none.
    """

    id: str
    title: str = ""
    kind: str = ""
    status: str = ""
    input: Any = None
    allowed: bool | None = None


@dataclass(frozen=True, slots=True)
class AcpReply:
    """What an agent did after one prompt.

    Attributes:
        text: its messages, one after the other.
        stop_reason: "end_turn", "max_tokens", "max_turn_requests", "refusal" or "cancelled".
        tool_calls: its tool calls, in the order of their first mention.
        updates: every update that it sent in this turn, as the protocol's package reads it.
    """

    text: str
    stop_reason: str
    tool_calls: tuple[AcpToolCall, ...]
    updates: tuple[Any, ...]


# "allow" and "reject" answer every request so; a function is asked about each.
Permissions = Literal["allow", "reject"] | Callable[[AcpToolCall], bool]
