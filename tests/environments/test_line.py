"""The line that names an environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.listed_tasks import ListedTasks
from areal_agents.environments.reference import updated
from areal_agents.environments.schemes import SCHEMES
from areal_agents.errors import TaskEnvironmentError

ROOT = Path(__file__).parents[2]


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
def test_an_invalid_line_is_refused(text: str) -> None:
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
    with pytest.raises(TaskEnvironmentError, match="tools has no option other; it has max_turns"):
        SCHEMES["tools"].take(EnvironmentLine.read("tools:b?other=x"))
    assert SCHEMES["gymnasium"].take(EnvironmentLine.read("gymnasium:b?other=x"))[1] == {"other": "x"}


def test_a_name_may_contain_a_question_mark() -> None:
    line = EnvironmentLine.read("mcp:https://host/mcp%3Fkey=a%20b?max_turns=3")
    assert line.name == "https://host/mcp?key=a%20b" and line.options == {"max_turns": 3}


def test_listed_tasks_are_held_out_by_number_by_list_or_by_file(tmp_path: Path) -> None:
    rows = [{"id": str(number)} for number in range(30)]

    def ids(options: str, split: Split) -> list[str]:
        line = EnvironmentLine.read(f"inspect:a?{options}")
        return [row["id"] for row in ListedTasks(line, SCHEMES["inspect"].take(line)[0], rows).of(split)]

    everything = {row["id"] for row in rows}
    for options, count in (("seed=1", 3), ("held_out=5", 5), ("held_out=29", 29)):
        held_out, train = ids(options, "eval"), ids(options, "train")
        assert len(held_out) == count and {*held_out, *train} == everything
        assert len(held_out) + len(train) == 30 and ids(options, "eval") == held_out
    assert ids("held_out=5&seed=1", "eval") != ids("held_out=5&seed=2", "eval")
    file = tmp_path / "held_out.txt"
    file.write_text("3\n\n 7 \n")
    for options in ('held_out=["7","3"]', f"held_out={file}"):
        assert ids(options, "eval") == ["3", "7"] and "3" not in ids(options, "train")
    assert ids('held_out=["0"]&size=2', "train") == ["1", "2"]
    for options, fault in (
        ('held_out=["x"]', "has no task x"),
        ("held_out=30", "leaves no task to train on"),
        ("held_out=-1", "held_out must be"),
        ("held_out=true", "held_out must be"),
        (f"held_out={tmp_path}/none", "cannot read"),
        ("size=-1", "size must be"),
    ):
        with pytest.raises(TaskEnvironmentError, match=fault):
            ids(options, "train")
    with pytest.raises(TaskEnvironmentError, match="holds out no task; .*eval: null"):
        ids("held_out=0", "eval")


def test_the_tables_of_the_documentation_are_current() -> None:
    page = (ROOT / "docs/environments.md").read_text()
    assert page == updated(page), "run: python -m areal_agents.environments.reference docs/environments.md"
