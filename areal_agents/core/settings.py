"""The base class of every group of settings in the configuration.

Settings are immutable, and a key that a class does not have is refused. Like pydantic, they accept the string
"3" for a number, because overrides on the command line are strings; unlike pydantic, they do not take `true`
for the number 1.
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
    def _refuse_booleans_for_numbers(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, bool) and (field := cls.model_fields.get(name)) is not None:
                types = _types(field.annotation)
                if types & {int, float} and bool not in types:
                    raise ValueError(f"{name} must be a number, got {str(value).lower()}")
        return values


def _types(annotation: Any) -> set[Any]:
    """The members of a union, or the type itself."""
    members = get_args(annotation)
    return {annotation}.union(*(_types(member) for member in members)) if members else {annotation}
