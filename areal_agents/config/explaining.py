"""What pydantic found wrong, in the words of a config file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from areal_agents.algorithms.parts import alternatives


def explain(fault: Mapping[str, Any], root: type[BaseModel]) -> str:
    """One fault of a tree that `root` refused; for an unknown key, with the nearest known one."""
    location = _without_kinds(root, [str(part) for part in fault["loc"]])
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        known = _known_keys(root, location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = (
            f"; did you mean {'.'.join([*location[:-1], nearest[0]])!r}?"
            if nearest
            else f"; known keys here: {', '.join(sorted(known))}"
        )
        return f"unknown key {key!r}{hint}"
    if fault["type"] == "missing":
        return f"{key!r} is required"
    if fault["type"] == "value_error":
        return (f"{key}: " if key else "") + str(fault["ctx"]["error"])
    return f"{key}: {fault['msg']} (got {fault['input']!r})"


def _without_kinds(model: type[BaseModel] | None, location: list[str]) -> list[str]:
    """A location as a config file has it: without the kinds by which alternative parts are told apart."""
    field = model.model_fields.get(location[0]) if model and location else None
    if field is None:
        return location
    first, rest = location[0], location[1:]
    parts = alternatives(field)
    if rest and rest[0] in parts:
        return [first, *_without_kinds(parts[rest[0]], rest[1:])]
    return [first, *_without_kinds(_model_in(field.annotation), rest)]


def _known_keys(model: type[BaseModel], location: Iterable[str]) -> list[str]:
    for part in location:
        if part.isdigit():  # a place in a list of what the part before it names
            continue
        field = model.model_fields.get(part)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found:
            return found
    return None
