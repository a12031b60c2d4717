"""Reads `environment:`, which stands for an agent, its tasks and a held-out evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_environment(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the agent, the data and the evaluation that an environment stands for, where they are not given."""
    named = given.get("environment")
    setting = {"use": named} if isinstance(named, str) else named
    if not isinstance(setting, Mapping) or not isinstance(setting.get("use"), str):
        return given
    filled = dict(given)
    if not filled.get("agent"):
        filled["agent"] = {"environment": setting["use"]}
        if setting.get("python"):
            filled["agent"]["python"] = setting["python"]
    data = filled.get("data", {})
    if not isinstance(data, Mapping):
        return filled
    has_own = any(data.get(source) for source in ("path", "episodes", "environment"))
    if not has_own:
        filled["data"] = {**data, "environment": dict(setting)}
    evaluation = filled.get("eval", None if has_own else {})
    if isinstance(evaluation, Mapping) and not evaluation.get("data"):
        filled["eval"] = {**evaluation, "data": {"environment": dict(setting), "split": "eval"}}
    return filled
