"""Decides which JSON schemas constrained decoding enforces.

xgrammar silently ignores some keywords, but an output under a schema must be valid; so each keyword is either
enforced where it stands or refused, as the table in docs/engines.md says. Keywords that JSON Schema does not
define, and annotations such as `title`, constrain nothing and are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from areal_agents.core.patterns import unenforced_pattern

Schema = Mapping[str, Any]

_IGNORED = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired"),
        *("dependentSchemas", "else", "if", "maxContains", "minContains", "multipleOf", "not", "then"),
    }
)
_STRING_FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("time", "uri", "uri-reference", "uri-template", "uuid"),
    }
)
# xgrammar enforces only one of these on a string.
_STRING_RULES = (("format",), ("pattern",), ("minLength", "maxLength"))
# xgrammar ignores all keywords beside one of these.
_BRANCHES = ("$ref", "anyOf", "oneOf", "allOf")
_VALUES = ("const", "enum")
_OF_TYPE = {
    "string": {"format", "maxLength", "minLength", "pattern"},
    "number": {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"},
    "array": {
        *(
            "additionalItems",
            "items",
            "maxItems",
            "minItems",
            "prefixItems",
            "unevaluatedItems",
            "uniqueItems",
        ),
    },
    "object": {
        *("additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties"),
        *("propertyNames", "required", "unevaluatedProperties"),
    },
}
_TYPES = frozenset({*_OF_TYPE, "integer", "boolean", "null"})
_RULES = frozenset({*_BRANCHES, *_VALUES, *(name for names in _OF_TYPE.values() for name in names)})
_ONE = (
    *("additionalItems", "additionalProperties", "items", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")
_MAX_DEPTH = 16  # levels of nested branches that are compared
_MAX_COMPARISONS = 20_000  # in one schema
_MAX_ONE_OF_BRANCHES = 64  # each of which is compared with all others


def unenforced(schema: Any) -> str | None:
    """Describes the first part of a schema that would not be enforced; None if all of it is."""
    return _Document(schema).unenforced()


class _Document:
    """A schema and the definitions that its references name."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._comparisons = 0

    def unenforced(self) -> str | None:
        if not isinstance(self._root, Mapping | bool):
            return f"a schema must be an object or a boolean, got {type(self._root).__name__}"
        for where, inner, names in self._subschemas():
            if (reason := self._reason(inner, where, names=names)) is not None:
                return f"{reason}, at {where}"
        return None

    def _subschemas(self) -> Iterator[tuple[str, Schema, bool]]:
        """(where, schema, whether it describes property names) of every subschema, without data."""
        left: list[tuple[str, Any, bool]] = [("#", self._root, False)]
        named: set[str] = set()
        while left:
            at, found, names = left.pop()
            if not isinstance(found, Mapping):
                continue
            yield at, found, names
            left += [(f"{at}/{key}", found.get(key), key == "propertyNames") for key in _ONE]
            for key in _LISTS:
                if isinstance(inner := found.get(key), list):
                    left += [(f"{at}/{key}/{index}", one, False) for index, one in enumerate(inner)]
            for key in _MAPS:
                if isinstance(inner := found.get(key), Mapping):
                    left += [(f"{at}/{key}/{name}", one, False) for name, one in inner.items()]
            reference = found.get("$ref")
            if isinstance(reference, str) and reference not in named:
                named.add(reference)
                left.append((reference, self._target(reference), False))

    def _reason(self, schema: Schema, where: str, *, names: bool) -> str | None:
        ignored = sorted(_IGNORED & schema.keys())
        if schema.get("uniqueItems", False) is not False:
            ignored.append("uniqueItems")
        if ignored:
            return f"the keyword {ignored[0]} is not supported"
        if "$id" in schema and where != "#":
            return "the keyword $id is supported only at the top level"
        for choices in (_BRANCHES, _VALUES):
            chosen = [name for name in choices if name in schema]
            if chosen and (beside := sorted(_RULES & schema.keys() - {chosen[0]})):
                return f"the keyword {beside[0]} is not supported beside {chosen[0]}"
            if chosen:
                return self._of_branches(schema, chosen[0])
        return self._of_type(schema, names=names)

    def _of_branches(self, schema: Schema, name: str) -> str | None:
        """Describe the part of a schema with the keyword `name` of _BRANCHES or _VALUES that is not
        enforced."""
        branches = schema[name]
        if name == "$ref" and self._target(branches) is None:
            return f"the $ref {branches!r} is not supported: name a part of the same schema, as in #/$defs/x"
        if name in ("anyOf", "oneOf", "allOf", "enum") and not (isinstance(branches, list) and branches):
            return f"the keyword {name} needs a non-empty list"
        if name == "allOf" and len(branches) > 1:
            return "the keyword allOf is supported with one branch only"
        if name == "oneOf" and not self._exclusive(branches):
            return (
                "the keyword oneOf is supported where the branches differ in type, or in the const or enum "
                f"of a required property, and with {_MAX_ONE_OF_BRANCHES} branches at most; use anyOf"
            )
        if "type" in schema:
            allowed, held = _named_types(schema["type"]), self._types({name: branches})
            if allowed is None:
                return f"the type {schema['type']!r} is not supported"
            if held is None or not held <= allowed:
                return (
                    f"the keyword type is not supported beside {name} unless all values that {name} allows "
                    "have that type"
                )
        return None

    def _of_type(self, schema: Schema, *, names: bool) -> str | None:
        """Describe what is not enforced of a schema of one or more types; property names have the type
        string."""
        given = schema.get("type", ["string"] if names else None)
        used = {kind for kind, keywords in _OF_TYPE.items() if keywords & schema.keys()}
        if given is None:
            # Only these keywords imply a type.
            if used <= {"object"} and ("properties" in schema or not used):
                given = ["object"]
            elif used == {"array"} and schema.keys() & {"items", "prefixItems"}:
                given = ["array"]
            else:
                kind = sorted(used)[0]
                keyword = sorted(_OF_TYPE[kind] & schema.keys())[0]
                return f"the keyword {keyword} is not supported without a type, such as {kind}, beside it"
        types = _named_types(given)
        if types is None:
            return f"the type {given!r} is not supported"
        reason = _of_string(schema) if "string" in types else None
        if reason is None and "object" in types:
            reason = _of_object(schema) or self._of_names(schema)
        return reason

    def _of_names(self, schema: Schema) -> str | None:
        """Describe what is not enforced of `propertyNames`. xgrammar can sample names that are not
        strings."""
        names = schema.get("propertyNames", {"type": "string"})
        if isinstance(names, Mapping) and "type" not in names and not names.keys() & {*_BRANCHES, *_VALUES}:
            strings_only = bool(_OF_TYPE["string"] & names.keys())
        else:
            strings_only = self._types(names) == {"string"}
        if strings_only:
            return None
        return "the keyword propertyNames needs a schema of strings only; give it type: string"

    def _target(self, reference: Any) -> Schema | bool | None:
        """The target of a reference; None unless it is a part of this schema, in a supported form."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        if "~" in reference or "%" in reference:
            return None
        found = self._root
        for name in reference.split("/")[1:]:
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        return found if isinstance(found, Mapping | bool) else None

    def _types(self, schema: Any, depth: int = 0) -> frozenset[str] | None:
        """The types of all values of a schema, integers as "integer"; None if not known."""
        if not isinstance(schema, Mapping) or self._too_much(depth):
            return None
        if (values := _values(schema)) is not None:
            return frozenset(_type_of(value) for value in values)
        if "$ref" in schema:
            return self._types(self._target(schema["$ref"]), depth + 1)
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(name), list):
                held = [self._types(branch, depth + 1) for branch in schema[name]]
                return None if None in held else frozenset().union(*(types for types in held if types))
        if "type" in schema:
            return _named_types(schema["type"])
        return frozenset({"object"}) if "properties" in schema else None

    def _exclusive(self, branches: list[Any]) -> bool:
        """Whether no value can match two of the branches."""
        few = len(branches) <= _MAX_ONE_OF_BRANCHES
        return few and all(self._exclude(one, other) for one, other in combinations(branches, 2))

    def _exclude(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether the types and listed values of two schemas prove that no value matches both."""
        if one is False or other is False:
            return True
        if self._too_much(depth):
            return False
        one, other = self._followed(one), self._followed(other)
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        for branched, rest in ((one, other), (other, one)):
            for name in ("anyOf", "oneOf", "allOf"):
                if isinstance(branched.get(name), list):
                    return all(self._exclude(branch, rest, depth + 1) for branch in branched[name])
        values, others = _values(one), _values(other)
        if values is not None and others is not None:
            return not {_key(value) for value in values} & {_key(value) for value in others}
        types, kinds = self._types(one), self._types(other)
        if types is None or kinds is None:
            return False
        shared = types & kinds
        if shared - {"object"}:
            return False
        return not shared or any(
            self._exclude(_property(one, name), _property(other, name), depth + 1)
            for name in {*_required(one)} & {*_required(other)}
        )

    def _too_much(self, depth: int) -> bool:
        """Whether to stop comparing: nested branches can grow without bound."""
        self._comparisons += 1
        return depth > _MAX_DEPTH or self._comparisons > _MAX_COMPARISONS

    def _followed(self, schema: Any) -> Any:
        """The schema at the end of a chain of references."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            schema = self._target(schema["$ref"])
        return None


def _of_string(schema: Schema) -> str | None:
    if "format" in schema and str(schema["format"]) not in _STRING_FORMATS:
        return f"the format {schema['format']!r} is not supported"
    rules = [next(key for key in keys if key in schema) for keys in _STRING_RULES if schema.keys() & {*keys}]
    if len(rules) > 1:
        return f"the keyword {rules[1]} is not supported beside {rules[0]}"
    return unenforced_pattern(schema["pattern"]) if isinstance(schema.get("pattern"), str) else None


def _of_object(schema: Schema) -> str | None:
    properties = schema.get("properties")
    declared = properties.keys() if isinstance(properties, Mapping) else set()
    missing = sorted(str(name) for name in {*_required(schema)} - {*declared})
    if missing:
        return f"the keyword required names {missing[0]!r}, which properties does not have"
    # A further property could repeat one of these in another spelling ("\\u0061" for "a"), or by its pattern.
    extra = [
        name
        for name in ("additionalProperties", "unevaluatedProperties")
        if schema.get(name, False) is not False
    ]
    open_ended = [*(name for name in ("patternProperties", "propertyNames") if name in schema), *extra]
    if open_ended and declared:
        why = "; leave it out or set it to false" if open_ended[0] in extra else ""
        return f"the keyword {open_ended[0]} is not supported beside properties{why}"
    if "propertyNames" in schema:  # xgrammar then ignores the others, even if they are false
        others = ("properties", "additionalProperties", "unevaluatedProperties")
        beside = [name for name in others if name in schema and name not in extra]
        if beside:
            return f"the keyword propertyNames is not supported beside {beside[0]}"
    if "patternProperties" in schema and len(open_ended) > 1:
        return f"the keyword {open_ended[1]} is not supported beside patternProperties"
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping):
        if len(patterns) > 1:
            return "the keyword patternProperties is supported with one pattern only"
        if (reason := next(filter(None, map(unenforced_pattern, patterns)), None)) is not None:
            return reason
    if open_ended and schema.get("minProperties", 0) != 0:
        return f"the keyword minProperties is not supported beside {open_ended[0]}: a name could occur twice"
    return None


def _named_types(given: Any) -> frozenset[str] | None:
    """The types of a `type` keyword; a number may be an integer. None if it names anything but types."""
    named = given if isinstance(given, list) else [given]
    if not named or not all(isinstance(name, str) and name in _TYPES for name in named):
        return None
    return frozenset({*named, *(["integer"] if "number" in named else [])})


def _values(schema: Schema) -> list[Any] | None:
    """The values that const or enum lists; None without either."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _key(value: Any) -> Any:
    """A hashable key, equal for values that are equal in JSON, where true is not 1."""
    if isinstance(value, list):
        return ("array", *map(_key, value))
    if isinstance(value, Mapping):
        return ("object", frozenset((name, _key(inner)) for name, inner in value.items()))
    return (isinstance(value, bool), value)


def _required(schema: Schema) -> Iterable[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _property(schema: Schema, name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None
