"""The values that an agent may give as a reward: a number within bounds, or numbers by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from areal_agents.errors import AgentError

LARGEST_REWARD = 1e12  # squares and sums of such values are far below the largest float32
RewardValue = bool | float | Mapping[str, float]


def checked_reward(value: Any) -> float | dict[str, float]:
    """Return `value` as a float within ±LARGEST_REWARD, or as a dict of such floats.

    Raises:
        AgentError: the value is neither a number within these bounds nor a dict of such numbers by name.
    """
    if isinstance(value, Mapping):
        if not value:
            raise AgentError("a reward dict must have at least one name, got {}")
        for key in value:
            if not isinstance(key, str) or not key:
                raise AgentError(f"the name of a reward must be a string that is not empty, got {key!r}")
        return {key: _finite(item, f"reward {key!r}") for key, item in value.items()}
    return _finite(value, "a reward")


def _finite(value: Any, what: str) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise AgentError(f"{what} must be a number, got {value!r:.200}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:  # an array of several numbers, or 10**400
        raise AgentError(f"{what} must be a number that a float can hold: {error}") from None
    if not math.isfinite(number):
        raise AgentError(f"{what} must be finite, got {number}")
    if abs(number) > LARGEST_REWARD:
        raise AgentError(f"{what} must be from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}, got {number:g}")
    return number
