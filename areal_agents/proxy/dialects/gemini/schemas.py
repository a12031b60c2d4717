"""Converts Google's schemas to JSON Schema.

Google's own form is a subset of OpenAPI's: types in upper case, `nullable`, `propertyOrdering`, and numbers
that may be strings. A schema that is already JSON Schema stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

_INT64 = re.compile(r"[0-9]{1,19}")  # Google's form of a count
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# `format` of a number says how it is stored, and "enum" repeats that there is an enum.
_STORAGE = ("int32", "int64", "float", "double", "enum")
_SCHEMAS = ("items", "additionalProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "defs")
_RENAMED = {
    "any_of": "anyOf", "property_ordering": "propertyOrdering", "prefix_items": "prefixItems",
    "additional_properties": "additionalProperties", "min_items": "minItems", "max_items": "maxItems",
    "min_length": "minLength", "max_length": "maxLength", "min_properties": "minProperties",
    "max_properties": "maxProperties",
}  # fmt: skip


def json_schema(schema: Any) -> Any:
    """Return the JSON Schema of a schema in Google's form; what is no object is returned unchanged."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for written, value in schema.items():
        name = str(_RENAMED.get(written, written))
        if name in ("nullable", "propertyOrdering", "example") or (name == "format" and value in _STORAGE):
            continue
        if name in _SCHEMAS:
            value = json_schema(value)
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            value = [json_schema(one) for one in value]
        elif name in _SCHEMA_MAPS and isinstance(value, dict):
            value = {key: json_schema(one) for key, one in value.items()}
        elif name in _COUNTS and isinstance(value, str) and _INT64.fullmatch(value):
            value = int(value)
        elif name == "type":
            if value == "TYPE_UNSPECIFIED":
                continue
            value = value.lower() if isinstance(value, str) else value
        out[name] = value
    ordering = schema.get("propertyOrdering", schema.get("property_ordering"))
    if isinstance(out.get("properties"), dict) and isinstance(ordering, list):
        out["properties"] = _ordered(out["properties"], ordering)
    return _nullable(out) if schema.get("nullable") is True else out


def _ordered(properties: dict[str, Any], ordering: list[Any]) -> dict[str, Any]:
    first = {name: properties[name] for name in ordering if isinstance(name, str) and name in properties}
    return first | properties


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also allows null."""
    if "enum" in schema or not isinstance(schema.get("type"), str):
        return {"anyOf": [schema, {"type": "null"}]}
    return schema | {"type": [schema["type"], "null"]}
