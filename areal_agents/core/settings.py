"""The base class of every group of settings in the configuration.

Settings are immutable, and a key that a class does not have is refused. Like pydantic, they accept the string
"3" for a number, because overrides on the command line are strings; unlike pydantic, they do not take `true`
for the number 1. A setting with the value "off" also accepts false, because YAML reads a bare `off` as false.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """Immutable settings; every field is validated when they are made."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_booleans(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        booleans = {name: value for name, value in values.items() if isinstance(value, bool)}
        return {**values, **{name: cls._read_boolean(name, value) for name, value in booleans.items()}}

    @classmethod
    def _read_boolean(cls, name: str, value: bool) -> Any:
        field = cls.model_fields.get(name)
        values = set() if field is None else _values(field.annotation)
        if value is False and "off" in values:
            return "off"
        takes_numbers = any(one in (int, float) or type(one) in (int, float) for one in values)
        if takes_numbers and bool not in values:
            raise ValueError(f"{name} must be a number, got {str(value).lower()}")
        return value


def _values(annotation: Any) -> set[Any]:
    """The types and the literal values in a union or a Literal, or the type itself."""
    members = get_args(annotation)
    return {annotation}.union(*(_values(member) for member in members)) if members else {annotation}
