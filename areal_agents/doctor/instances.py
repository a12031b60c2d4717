"""Makes a small value that fits a JSON schema, for the tool calls and JSON answers of the scripted model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEEPEST = 12
_BY_FORMAT = {
    "date": "2025-01-15",
    "date-time": "2025-01-15T12:00:00Z",
    "time": "12:00:00",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "url": "https://example.com/",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "192.0.2.1",
}


def instance_of(schema: Any) -> Any:
    """Return a value that fits the types, required fields, enumerations and simple bounds of `schema`."""
    return _value(schema, schema if isinstance(schema, Mapping) else {}, 0)


def _value(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    if "$ref" in schema:
        return _value(_referred(root, str(schema["$ref"])), root, depth + 1)
    for given in ("const", "default", "example"):
        if schema.get(given) is not None:
            return schema[given]
    for listed in ("enum", "examples"):
        if isinstance(schema.get(listed), list) and schema[listed]:
            return schema[listed][0]
    for choice in ("anyOf", "oneOf"):
        if schema.get(choice):
            return _value(_first_non_null(schema[choice]), root, depth + 1)
    if schema.get("allOf"):
        return _value(_merged(schema, root), root, depth + 1)
    return _typed(_type_of(schema), schema, root, depth)


def _typed(kind: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    match kind:
        case "object":
            properties = schema.get("properties") or {}
            needed = schema.get("required", [])
            return {name: _value(properties.get(name, {}), root, depth + 1) for name in needed}
        case "array":
            count = max(int(schema.get("minItems", 0)), 1 if "items" in schema else 0)
            return [_value(schema.get("items", {}), root, depth + 1) for _ in range(count)]
        case "string":
            text = _BY_FORMAT.get(str(schema.get("format")), "example")
            text = text.ljust(int(schema.get("minLength", 0)), "x")
            return text[: int(schema["maxLength"])] if "maxLength" in schema else text
        case "integer" | "number":
            return _number(schema)
        case "boolean":
            return True
    return None


def _number(schema: Mapping[str, Any]) -> int | float:
    if "exclusiveMinimum" in schema:
        return schema["exclusiveMinimum"] + 1
    if "minimum" in schema:
        return schema["minimum"]
    return min(1, schema.get("maximum", 1))


def _type_of(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    if kind is None:
        return "object" if "properties" in schema else "array" if "items" in schema else "string"
    return str(kind)


def _first_non_null(choices: list[Any]) -> Any:
    """Return the first alternative that is not null."""
    real = (c for c in choices if not (isinstance(c, Mapping) and c.get("type") == "null"))
    return next(real, choices[0])


def _merged(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
    for part in schema["allOf"]:
        whole = _referred(root, str(part["$ref"])) if "$ref" in part else part
        properties = {**merged.get("properties", {}), **whole.get("properties", {})}
        required = [*merged.get("required", []), *whole.get("required", [])]
        merged.update(whole)
        if properties:
            merged.update(properties=properties, required=required)
    return merged


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part, {}) if part and isinstance(found, Mapping) else found
    return found
