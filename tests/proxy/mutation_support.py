"""Changes that agent frameworks make to a reply before they send it back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutation:
    """The changes that a framework makes to a reply before it sends it back; by default none."""

    arguments: str = "raw"
    reasoning: str = "keep"
    content: str = "as is"
    absent: str = "missing"
    extras: bool = False
    item_ids: bool = True


ARGUMENT_FORMS = ("raw", "py", "py-ascii", "compact", "sorted", "reversed", "js")


def rewritten(arguments: str, form: str) -> str:
    """Return JSON arguments as another language or library would serialise them."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    match form:
        case "py":
            return json.dumps(value, ensure_ascii=False)
        case "py-ascii":
            return json.dumps(value)
        case "compact":
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        case "sorted":
            return json.dumps(value, sort_keys=True, indent=1)
        case "reversed":
            return json.dumps(dict(reversed(value.items())) if isinstance(value, dict) else value)
        case "js":
            return json.dumps(_without_fractions(value), separators=(",", ":"), ensure_ascii=False)
    return arguments


def _without_fractions(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _without_fractions(item) for key, item in value.items()}
    return [_without_fractions(item) for item in value] if isinstance(value, list) else value


def mutated_text(text: str, mutation: Mutation, has_calls: bool) -> str:
    """Return content that is padded, stripped, or dropped if the reply has tool calls."""
    match mutation.content:
        case "padded":
            return f"\n{text}  \n"
        case "stripped":
            return text.strip()
        case "dropped" if has_calls:
            return ""
    return text
