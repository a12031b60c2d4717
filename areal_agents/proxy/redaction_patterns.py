"""Patterns of text that is often redacted. Each matches in linear time: repetitions are possessive."""

from __future__ import annotations

from collections.abc import Mapping

# Patterns by the names under which a configuration can have them as `default`.
KNOWN_PATTERNS: Mapping[str, str] = {
    "email": r"(?<![\w.+-])[\w.+-]{1,64}+@[\w-]{1,63}+(?:\.[\w-]{1,63}+){1,8}+",
    "phone": r"(?<![\w+])\+\d{1,3}+(?:[ ./-]?\(?\d{1,5}+\)?){2,6}+(?!\w)",
    "card": r"(?<![\w-])\d{4}(?:[ -]?\d{4}){3}(?![\w-])",
    "ip": r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])",
}
