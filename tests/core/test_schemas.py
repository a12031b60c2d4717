from __future__ import annotations

from typing import Any

import pytest

from areal_agents.core.schemas import unenforced


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "the keyword not is not supported, at #"),
        (
            {"properties": {"a": {"uniqueItems": True}}},
            "the keyword uniqueItems is not supported, at #/properties/a",
        ),
        ({"items": {"anyOf": [{}, {"if": {}}]}}, "the keyword if is not supported, at #/items/anyOf/1"),
        ({"$defs": {"x": {"multipleOf": 5}}}, "the keyword multipleOf is not supported, at #/$defs/x"),
        ({"$ref": "#/$defs/x", "minimum": 3}, "the keyword minimum is not supported beside $ref, at #"),
        ({"properties": {}, "oneOf": [{}]}, "the keyword properties is not supported beside oneOf, at #"),
        ({"allOf": [{}, {}]}, "the keyword allOf is supported with one branch only, at #"),
        ({"type": "string", "format": "isbn"}, "the format 'isbn' is not supported, at #"),
        (
            {"type": "string", "pattern": "a", "maxLength": 3},
            "the keyword maxLength is not supported beside pattern, at #",
        ),
        *(
            ({"type": "object", "propertyNames": names, "$defs": {"x": {"type": "integer"}}}, "strings only")
            for names in (
                {},
                True,
                {"title": "t"},
                {"type": ["string", "integer"]},
                {"enum": ["a", 1]},
                {"$ref": "#/$defs/x"},
                {"anyOf": [{"type": "string"}, {}]},
            )
        ),
        (
            {"type": ["string", "null"], "format": "date", "pattern": "a"},
            "pattern is not supported beside format",
        ),
    ],
)
def test_a_keyword_that_would_be_ignored_is_named(schema: dict[str, Any], reason: str) -> None:
    assert reason in str(unenforced(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "object", "properties": {"not": {"type": "string", "format": "date"}}, "required": ["not"]},
        {"enum": [{"not": 1}], "title": "if"},
        {"const": {"uniqueItems": True}},
        {"$ref": "#/$defs/x", "description": "d", "default": 1, "$defs": {"x": {"type": "integer"}}},
        {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 3}, {"type": "null"}], "title": "t"},
        {"type": "integer", "format": "int32", "minimum": 0, "exclusiveMaximum": 5},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        {
            "type": "object",
            "propertyNames": {"anyOf": [{"$ref": "#/$defs/s"}]},
            "$defs": {"s": {"type": "string"}},
        },
        {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1, "maxItems": 2},
    ],
)
def test_schemas_that_are_enforced_are_accepted(schema: Any) -> None:
    assert unenforced(schema) is None
