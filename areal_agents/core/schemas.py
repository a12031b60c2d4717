"""Which JSON schemas constrained decoding holds an output to.

xgrammar drops some keywords without a word, and an output that is said to fit must fit; so a schema that
has one of them is refused, as SGLang does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_IGNORED = frozenset(
    {
        *("$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
        *("maxContains", "minContains", "multipleOf", "not", "then", "uniqueItems"),
    }
)
_STRING_FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer"),
        *("relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid"),
    }
)
# Of these, a text is held to one alone.
_STRING_RULES = (("format",), ("pattern",), ("minLength", "maxLength"))
# Where one of these stands, what stands beside it is dropped, but for `type`, which the branches repeat.
_BRANCHES = ("$ref", "anyOf", "oneOf", "allOf")
_RULES = frozenset(
    {
        *("additionalProperties", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "items"),
        *("maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties"),
        *("minimum", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames"),
        *("required", "unevaluatedItems", "unevaluatedProperties", *_BRANCHES),
    }
)
_ONE = (
    *("additionalItems", "additionalProperties", "items", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")


def unenforced(schema: Any) -> str | None:
    """What in the schema an output would not be held to, and where; None if all of it is enforced."""
    for where, inner in _subschemas(schema, "#"):
        if (reason := _unenforced(inner)) is not None:
            return f"{reason}, at {where}"
    return None


def _unenforced(schema: Mapping[str, Any]) -> str | None:
    ignored = sorted(_IGNORED & schema.keys())
    if ignored:
        return f"the keyword {ignored[0]} is not supported"
    branches = [name for name in _BRANCHES if name in schema]
    if branches and (beside := sorted(_RULES & schema.keys() - {branches[0]})):
        return f"the keyword {beside[0]} is not supported beside {branches[0]}"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return "the keyword allOf is supported with one branch only"
    kind = schema.get("type")
    if kind is not None and "string" not in (kind if isinstance(kind, list) else [kind]):
        return None
    if "format" in schema and str(schema["format"]) not in _STRING_FORMATS:
        return f"the format {schema['format']!r} is not supported"
    rules = [next(key for key in keys if key in schema) for keys in _STRING_RULES if schema.keys() & {*keys}]
    return f"the keyword {rules[1]} is not supported beside {rules[0]}" if len(rules) > 1 else None


def _subschemas(schema: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schema and all in it, with where they stand; what is data, as in `const`, is left out."""
    left = [(where, schema)]
    while left:
        at, found = left.pop()
        if not isinstance(found, Mapping):
            continue
        yield at, found
        left += [(f"{at}/{key}", found.get(key)) for key in _ONE]
        for key in _LISTS:
            if isinstance(inner := found.get(key), list):
                left += [(f"{at}/{key}/{index}", one) for index, one in enumerate(inner)]
        for key in _MAPS:
            if isinstance(inner := found.get(key), Mapping):
                left += [(f"{at}/{key}/{name}", one) for name, one in inner.items()]
