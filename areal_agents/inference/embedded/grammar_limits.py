"""Limits on the size of a grammar, which are checked before it is compiled.

The compiler is written in C++ and cannot be interrupted, and it recurses: a deeply nested pattern overflows
its stack and ends the process, and thousands of alternatives take minutes. So each grammar is measured first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from areal_agents.core.completion import Grammar

MOST_CHARACTERS = 256 * 1024  # of the grammar's text
MOST_DEPTH = 128  # JSON values within JSON values
MOST_VALUES = 5_000  # of all enums
MOST_SCHEMAS = 5_000  # properties, prefixItems and branches, all together
MOST_GROUPS = 2_000  # of one pattern, nested or not
MOST_REPEATS = 1_000  # a repetition count
MOST_OF = {  # by keyword
    **dict.fromkeys(("maxLength", "minLength"), 10_000),
    **dict.fromkeys(("maxItems", "maxProperties", "minItems", "minProperties"), 1_000),
}
MOST_COMPILED_BYTES = 64 * 1024 * 1024
_DATA = ("const", "default", "enum", "examples")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_REPEATS = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def refuse_too_large(grammar: Grammar) -> None:
    """ValueError that names the limit, for a grammar that could take too long to compile."""
    if len(grammar.text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(grammar.text)} characters, at most {MOST_CHARACTERS} are supported")
    if grammar.kind in ("regex", "ebnf"):
        _refuse_pattern(grammar.text)
        return
    if _depth(grammar.text) > MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep")
    values = schemas = 0
    for node in objects_of(json.loads(grammar.text)):
        values += len(node["enum"]) if isinstance(node.get("enum"), list) else 0
        for name in ("allOf", "anyOf", "oneOf", "patternProperties", "prefixItems", "properties"):
            schemas += len(node[name]) if isinstance(node.get(name), list | dict) else 0
        for name, most in MOST_OF.items():
            bound = node.get(name)
            if isinstance(bound, int | float) and bound > most:
                raise ValueError(f"{name} is {bound}, at most {most} is supported")
        if isinstance(node.get("pattern"), str):
            _refuse_pattern(node["pattern"])
        if isinstance(node.get("patternProperties"), dict):
            for pattern in node["patternProperties"]:
                _refuse_pattern(pattern)
    if values > MOST_VALUES:
        raise ValueError(f"its enums have {values} values, at most {MOST_VALUES} are supported")
    if schemas > MOST_SCHEMAS:
        raise ValueError(f"it has {schemas} properties and branches, at most {MOST_SCHEMAS} are supported")


def refuse_compiled(size_bytes: int) -> None:
    """ValueError for a compiled grammar that takes too much memory."""
    if size_bytes > MOST_COMPILED_BYTES:
        raise ValueError(f"it takes {size_bytes} bytes compiled, at most {MOST_COMPILED_BYTES} are supported")


def _refuse_pattern(pattern: str) -> None:
    if pattern.count("(") > MOST_GROUPS:
        raise ValueError(f"a pattern has more than {MOST_GROUPS} groups")
    for counts in _REPEATS.findall(pattern):
        if any(count and int(count[:6]) > MOST_REPEATS for count in counts):
            raise ValueError(f"a pattern has a repetition count above {MOST_REPEATS}")


def _depth(text: str) -> int:
    """The deepest nesting of arrays and objects in a JSON text."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def objects_of(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects of a JSON value except those within the data of a schema, such as `enum`."""
    left = [tree]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            yield found
            left += [value for name, value in found.items() if name not in _DATA]
        elif isinstance(found, list):
            left += found
