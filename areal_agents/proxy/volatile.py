"""Marks volatile text: parts of a message that a client changes from call to call, and that say nothing.

A client that writes a new hash or the time of day into its system message makes every prompt a new one. A
rule names such text. Conversations are then compared without it (see `Message.volatile`), and the model reads
it as it was first recorded in the conversation (see `Forest.as_first_seen`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator

from areal_agents.core.bounded_patterns import FEWEST_LITERALS, LONGEST, BoundedPattern
from areal_agents.core.messages import Message, Span
from areal_agents.core.settings import Settings


class VolatileRule(Settings):
    """Text that a client changes from call to call and that the model need not read anew."""

    pattern: str = Field(
        description=f"Regular expression of the text. It begins with at least {FEWEST_LITERALS} literal "
        "characters, which stay an ordinary part of the message; what it matches after them, at most "
        f"{LONGEST} characters, is volatile."
    )
    client: str = Field(
        default="", description="Part of the client's User-Agent, for example claude-cli; empty: all clients."
    )
    roles: tuple[Literal["system", "user", "tool"], ...] = Field(
        default=("system",), min_length=1, description="Roles of the messages that contain the text."
    )

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        BoundedPattern(pattern)
        return pattern


# These apply unless the configuration has another rule, or "off", under the same name.
KNOWN_RULES: Mapping[str, VolatileRule] = {
    # The first block of claude-code's system message. Hashes of the request end the version, and are in cch:
    # "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
    "claude-code-billing": VolatileRule(pattern=r"x-anthropic-billing-header:[^\n]*", client="claude-cli")
}


class VolatileText:
    """Marks the volatile text in the messages of each client."""

    def __init__(self, rules: Mapping[str, VolatileRule | Literal["off"]]) -> None:
        """Apply the known rules and those of a configuration."""
        chosen = {**KNOWN_RULES, **rules}.values()
        self._rules = [(r, BoundedPattern(r.pattern)) for r in chosen if isinstance(r, VolatileRule)]

    def marked(self, messages: Sequence[Message], client: str) -> tuple[Message, ...]:
        """Return messages with their volatile parts marked; `client` is a User-Agent."""
        agent = client.lower()
        rules = [(rule, pattern) for rule, pattern in self._rules if rule.client.lower() in agent]
        return tuple(_marked(message, rules) for message in messages) if rules else tuple(messages)


def _marked(message: Message, rules: Sequence[tuple[VolatileRule, BoundedPattern]]) -> Message:
    if message.volatile:  # a recorded message, of a response that this one continues
        return message
    spans: list[Span] = []
    for rule, pattern in rules:
        if message.role in rule.roles:
            spans += pattern.spans(message.content)
    return replace(message, volatile=_disjoint(spans)) if spans else message


def _disjoint(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans in order; of those that overlap, the first."""
    kept: list[Span] = []
    for span in sorted(spans):
        if not kept or span[0] >= kept[-1][1]:
            kept.append(span)
    return tuple(kept)
