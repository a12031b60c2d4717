"""Replaces text that must not be stored, before the model reads it.

A request is redacted before its prompt is rendered. So the model reads what is stored, and the recorded
tokens stay exactly what it read. What it samples is stored as it was sampled: it has not read what was
replaced. A request that cannot be redacted in time is refused; nothing of it is stored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from areal_agents.core.messages import Message
from areal_agents.errors import ConfigError, RequestError
from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.proxy.redaction_patterns import KNOWN_PATTERNS

DEFAULT = "default"
_LONGEST_S = 2.0  # for all texts of one request


class Redaction:
    """Replaces every match of the patterns of a configuration by [NAME].

    Args:
        patterns: regular expressions of the package regex by name; `default`: the known pattern of the name.

    Raises:
        ConfigError: a pattern is invalid, or a name has no known pattern.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        import regex  # has a time limit, and runs without holding up other threads

        self._rules: list[tuple[Any, str]] = []
        for name, pattern in patterns.items():
            if pattern == DEFAULT and name not in KNOWN_PATTERNS:
                known = ", ".join(KNOWN_PATTERNS)
                raise ConfigError(f"proxy.redact: {name} has no default; give a pattern, or one of {known}")
            try:
                compiled = regex.compile(KNOWN_PATTERNS[name] if pattern == DEFAULT else pattern)
            except regex.error as error:
                raise ConfigError(
                    f"proxy.redact: {name}: {pattern!r} is not a valid pattern: {error}"
                ) from error
            self._rules.append((compiled, f"[{name}]"))

    def redacted(self, request: ModelRequest) -> ModelRequest:
        """Return a request without the text that matches, in messages of every role and in raw prompts.

        Raises:
            RequestError: 400 if the prompt is given as token ids, or if the patterns take too long.
        """
        raw = request.raw_prompt
        if raw is not None and not isinstance(raw, str):
            raise RequestError(
                "a prompt of token ids cannot be redacted (proxy.redact); send text",
                code="redaction_failed",
                param="prompt",
            )
        reading = _Reading(self._rules, time.monotonic() + _LONGEST_S)
        try:
            messages = tuple(reading.message(message) for message in request.messages)
            return replace(request, messages=messages, raw_prompt=None if raw is None else reading.text(raw))
        except TimeoutError:
            raise RequestError(
                f"the text could not be redacted within {_LONGEST_S:g} s (proxy.redact); send less",
                code="redaction_failed",
            ) from None


class _Reading:
    """Redacts the texts of one request, which share a deadline. Raises TimeoutError after it."""

    def __init__(self, rules: Sequence[tuple[Any, str]], deadline: float) -> None:
        self._rules = rules
        self._deadline = deadline  # by time.monotonic()

    def message(self, message: Message) -> Message:
        """Return a message without the text that matches."""
        content, reasoning = self.text(message.content), self.text(message.reasoning)
        calls = tuple(
            call
            if (text := self._arguments(call.arguments)) == call.arguments
            else replace(call, arguments=text)
            for call in message.tool_calls
        )
        if (content, reasoning, calls) == (message.content, message.reasoning, message.tool_calls):
            return message
        return replace(message, content=content, reasoning=reasoning, tool_calls=calls, volatile=())

    def text(self, text: str) -> str:
        """Return a text without what matches."""
        for pattern, name in self._rules:
            if text:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                text = pattern.sub(name, text, timeout=left_s, concurrent=True)
        return text

    def _arguments(self, text: str) -> str:
        """Redact the values of a call's arguments, because escapes of JSON would hide what is beside them.

        Arguments that are not JSON are redacted as they are.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self.text(text)
        redacted = self._value(value)
        return text if redacted == value else json.dumps(redacted, ensure_ascii=False)

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.text(name): self._value(of) for name, of in value.items()}
        if isinstance(value, list):
            return [self._value(of) for of in value]
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = self.text(str(value))  # a number may be that of a card
            return value if text == str(value) else text
        return value


def redaction_of(patterns: Mapping[str, str]) -> Redaction | None:
    """Return the redaction of a configuration; None if it has no patterns."""
    return Redaction(patterns) if patterns else None
