"""The setting that names an environment."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from areal_agents.core.settings import Settings
from areal_agents.environments.line import EnvironmentLine
from areal_agents.errors import TaskEnvironmentError


class EnvironmentConfig(Settings):
    """An environment, in place of an agent and its tasks; a string is short for `use`."""

    use: str = Field(
        description="scheme:name?option=value, such as reasoning-gym:countdown?size=500; "
        "docs/environments.md lists the schemes.",
    )
    python: str = Field(
        default="",
        description="A Python interpreter that has the environment's package and areal-agents; the "
        "environment runs in a process of it. Empty: in the rollout process.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"use": given} if isinstance(given, str) else given

    @field_validator("use")
    @classmethod
    def _is_a_line(cls, use: str) -> str:
        try:
            EnvironmentLine.read(use)
        except TaskEnvironmentError as error:
            raise ValueError(str(error)) from None
        return use
