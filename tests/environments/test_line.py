"""The line that names an environment."""

from __future__ import annotations

import pytest

from areal_agents.environments.line import EnvironmentLine
from areal_agents.errors import TaskEnvironmentError


def test_a_line_has_a_scheme_a_name_and_options() -> None:
    line = EnvironmentLine.read(
        ' reasoning-gym:countdown?size=500&rate=0.5&operators=["%2B"]&word=a%20b&on=true '
    )
    assert (line.scheme, line.name) == ("reasoning-gym", "countdown")
    assert line.options == {"size": 500, "rate": 0.5, "operators": ["+"], "word": "a b", "on": True}
    assert EnvironmentLine.read("tools:/a/b.py:Class").name == "/a/b.py:Class"


@pytest.mark.parametrize(
    "text", ["", "countdown", "reasoning-gym:", ":countdown", "a:b?size", "a:b?x=1&x=2", "a:b?&"]
)
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(TaskEnvironmentError, match=r"scheme:name|option=value|more than once"):
        EnvironmentLine.read(text)


def test_options_have_the_types_of_their_defaults() -> None:
    line = EnvironmentLine.read("a:b?count=3&share=1&name=7&other=x")
    taken, rest = line.take(count=1, share=0.5, name="", left="default")
    assert taken == {"count": 3, "share": 1.0, "name": "7", "left": "default"} and rest == {"other": "x"}
    assert type(taken["share"]) is float
    for wrong in ("count=x", "count=true", "count=1.5", "share=yes"):
        with pytest.raises(TaskEnvironmentError, match="must be"):
            EnvironmentLine.read(f"a:b?{wrong}").take(count=1, share=0.5)
    with pytest.raises(TaskEnvironmentError, match="a has no option other; it has count"):
        line.refuse(rest, {"count": 1})
