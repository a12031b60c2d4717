"""Reads `environment:` and `environments:`, which stand for an agent, its tasks and a held-out evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal_agents.environments.line import EnvironmentLine
from areal_agents.errors import TaskEnvironmentError

_SOURCES = ("path", "episodes", "environment", "sources")


def with_environment(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the agent, the data and the evaluation that an environment stands for, where they are not given.

    What is not of the right form is left as it is, for the validation of the settings.
    """
    if given.get("environments"):
        return _with_several(given)
    named = given.get("environment")
    setting = {"use": named} if isinstance(named, str) else named
    if not isinstance(setting, Mapping) or not isinstance(setting.get("use"), str):
        return given
    agent = {
        "environment": setting["use"],
        **({"python": setting["python"]} if setting.get("python") else {}),
    }
    data = {"environment": dict(setting)}
    return _filled(given, agent=agent, data=data, held_out={**data, "split": "eval"})


def _with_several(given: Mapping[str, Any]) -> Mapping[str, Any]:
    listed = given["environments"]
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return given
    settings = [{"use": one} if isinstance(one, str) else one for one in listed]
    if not all(isinstance(one, Mapping) and isinstance(one.get("use"), str) for one in settings):
        return given
    settings = [{**one, "name": one.get("name") or name_of_line(one["use"])} for one in settings]
    environments = [{key: one[key] for key in ("name", "use", "python") if key in one} for one in settings]
    sources = [
        {
            **{key: one[key] for key in ("name", "weight", "sampler", "difficulty") if key in one},
            "environment": {key: one[key] for key in ("use", "python") if key in one},
        }
        for one in settings
    ]
    held_out = [
        {**{key: source[key] for key in ("name", "weight", "environment") if key in source}, "split": "eval"}
        for source in sources
    ]
    filled = _filled(
        given,
        agent={"environments": environments},
        data={"sources": sources},
        held_out={"sources": held_out},
    )
    return {**filled, "environments": settings}


def _filled(
    given: Mapping[str, Any],
    *,
    agent: Mapping[str, Any],
    data: Mapping[str, Any],
    held_out: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Return the settings with an agent, data and an evaluation where these are not given."""
    filled = dict(given)
    if not filled.get("agent"):
        filled["agent"] = dict(agent)
    of_user = filled.get("data", {})
    if not isinstance(of_user, Mapping):
        return filled
    has_own = any(of_user.get(source) for source in _SOURCES)
    if not has_own:
        filled["data"] = {**of_user, **data}
    evaluation = filled.get("eval", None if has_own else {})
    if isinstance(evaluation, Mapping) and not evaluation.get("data"):
        filled["eval"] = {**evaluation, "data": dict(held_out)}
    return filled


def name_of_line(use: str) -> str:
    """Return a name for the environment of a line: the last word of what the scheme names."""
    try:
        name = EnvironmentLine.read(use).name
    except TaskEnvironmentError:
        return ""  # the validation of the line says why
    words = re.findall(r"[\w.-]+", name.rstrip("/"))
    return words[-1].removesuffix(".py") if words else ""
