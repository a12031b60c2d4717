"""Reads the line that names an environment: `scheme:name?option=value&option=value`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from areal_agents.errors import TaskEnvironmentError


@dataclass(frozen=True, slots=True)
class EnvironmentLine:
    """What a line says.

    Attributes:
        text: the line.
        scheme: the adapter, such as "reasoning-gym".
        name: what the adapter opens, such as "countdown"; in the text, %3F stands for a question mark.
        options: the options; a value that is valid JSON is read as JSON, any other is a string.
    """

    text: str
    scheme: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> EnvironmentLine:
        """Read a line. Raises TaskEnvironmentError if it has no scheme or name, or an option has no value."""
        address, _, query = text.strip().partition("?")
        scheme, colon, name = address.partition(":")
        if not colon or not scheme or not name:
            raise TaskEnvironmentError(
                f"an environment is scheme:name?option=value, such as reasoning-gym:countdown?size=500, "
                f"got {text!r}"
            )
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
        except ValueError as error:
            raise TaskEnvironmentError(f"{text!r}: the options must be option=value&option=value") from error
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise TaskEnvironmentError(f"{text!r} gives {', '.join(twice)} more than once")
        options = {option: _value(value) for option, value in pairs}
        return cls(text.strip(), scheme, _QUESTION_MARK.sub("?", name), options)

    def take(self, **defaults: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the options into those of `defaults`, completed by them, and the others.

        Raises:
            TaskEnvironmentError: an option has another type than its default.
        """
        taken, rest = dict(defaults), {}
        for name, value in self.options.items():
            if name not in defaults:
                rest[name] = value
                continue
            wanted = type(defaults[name])
            if wanted is str and not isinstance(value, str):
                value = json.dumps(value)
            if wanted is float and type(value) is int:
                value = float(value)
            if name == "max_turns" and type(value) is int and value < 1:
                raise TaskEnvironmentError(f"{self.text!r}: max_turns must be at least 1")
            if wanted is not type(None) and type(value) is not wanted:
                raise TaskEnvironmentError(f"{self.text!r}: {name} must be {_KINDS[wanted]}, got {value!r}")
            taken[name] = value
        return taken, rest


_QUESTION_MARK = re.compile("%3[Ff]")
_KINDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
