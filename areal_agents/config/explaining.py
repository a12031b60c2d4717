"""What pydantic found wrong, in the words of a config file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel


def explain(fault: Mapping[str, Any], root: type[BaseModel]) -> str:
    """One fault of a tree that `root` refused; for an unknown key, with the nearest known one."""
    location = [str(part) for part in fault["loc"]]
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
