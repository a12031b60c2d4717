"""Settings read the booleans of YAML as intended: not as numbers, and a bare `off` not as false."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import ValidationError

from areal_agents.core.settings import Settings
from areal_agents.training.config import LoraConfig, TrainerConfig


class Example(Settings):
    steps: int = 1
    rate: float | None = None
    kept: Literal["all"] | int = "all"
    tier: Literal[0, 1] = 0
    check: Literal["off", "first"] = "first"
    every: Literal["off"] | int = 1
    either: bool | int = 0
    switch: bool = False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", True), ("steps", False), ("rate", True), ("kept", False), ("tier", True), ("tier", False),
        ("every", True),
    ],
)  # fmt: skip
def test_a_boolean_is_not_read_as_a_number(name: str, value: bool) -> None:
    with pytest.raises(ValidationError, match=f"{name} must be a number, got {str(value).lower()}"):
        Example(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("check", False, "off"), ("every", False, "off"), ("either", True, True), ("switch", True, True),
        ("steps", "3", 3), ("rate", "1e-4", 1e-4), ("rate", None, None), ("tier", 1, 1),
    ],
)  # fmt: skip
def test_values_are_read_as_intended(name: str, value: Any, read: Any) -> None:
    found = getattr(Example(**{name: value}), name)
    assert found == read and type(found) is type(read)


def test_booleans_in_settings_of_the_trainer_are_read_as_intended() -> None:
    assert TrainerConfig(activation_checkpointing=False).activation_checkpointing == "off"  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="steps must be a number, got true"):
        TrainerConfig(steps=True)
    with pytest.raises(ValidationError, match="rank must be a number, got true"):
        LoraConfig(rank=True)


def test_settings_are_immutable_and_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example().steps = 2
    with pytest.raises(ValidationError, match="Extra inputs"):
        Example(stepz=2)  # type: ignore[call-arg]
