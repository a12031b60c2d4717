"""Environments of several schemes, each from one line, with the real package, through the running proxy.

The packages are in an environment of their own (`make environments`), since some of them pin other versions
of packages that this project uses.
"""

from __future__ import annotations

import re

import pytest
from environment_support import Heard, played, tasks
from integration_support import Stack

from areal_agents.errors import AgentError, TaskEnvironmentError

pytestmark = pytest.mark.environments


def test_reasoning_gym_generates_and_grades(stack: Stack, python: str) -> None:
    use = "reasoning-gym:basic_arithmetic?size=40&held_out=10&difficulty=0&seed=3"
    train, held_out = tasks(use, python), tasks(use, python, "eval")
    assert len(held_out) <= 10 and not {row["question"] for row in train} & {
        row["question"] for row in held_out
    }
    assert tasks(use, python) == train
    for row in (train[0], held_out[-1]):
        right = Heard(f"I think.\n<answer>{row['answer']}</answer>")
        assert played(stack, use, row, right, python=python) == 1.0
        assert str(row["question"]) in right.prompts[0] and "<answer>" in right.prompts[0]
        assert played(stack, use, row, [str(row["answer"])], python=python) == 1.0  # without tags
        assert played(stack, use, row, ["<answer>nothing</answer>"], python=python) < 1.0
    with pytest.raises(AgentError, match="is another question in this version"):
        played(stack, use, {**train[0], "question": "?"}, ["1"], python=python)


def test_tasks_that_follow_the_order_of_a_set_are_the_same_in_every_process(
    stack: Stack, python: str
) -> None:
    """One process lists the tasks, and another one plays them."""
    use = "reasoning-gym:isomorphic_strings?size=10&held_out=1"
    listed = tasks(use, python)
    assert tasks(use, python) == listed
    assert played(stack, use, listed[-1], [str(listed[-1]["answer"])], python=python) == 1.0


def test_a_textarena_game_is_played_to_its_end(stack: Stack, python: str) -> None:
    use = "textarena:GuessTheNumber-v0?size=3&held_out=2"
    assert [row["id"] for row in tasks(use, python, "eval")] == ["eval-0", "eval-1"]
    task = tasks(use, python)[0]
    said = Heard(*(f"I guess [{number}]" for number in range(1, 21)))
    first = played(stack, use, task, said, python=python)
    assert (
        "between 1 and 20" in said.prompts[0] and "higher" in said.news[1] and "I guess [1]" in said.news[1]
    )
    again = Heard(*(f"I guess [{number}]" for number in range(1, 21)))
    assert played(stack, use, task, again, python=python) == first and again.prompts == said.prompts


def test_a_gymnasium_environment_is_played_with_text(stack: Stack, python: str) -> None:
    use = "gymnasium:FrozenLake-v1?is_slippery=false&size=2&held_out=1"
    task = tasks(use, python)[0]
    way = Heard("What?", "Go down: 1", "1", "2", "2", "1", "2")  # down, down, right, right, down, right
    assert played(stack, use, task, way, python=python) == 1.0
    assert "Frozen lake" in way.prompts[0] and "from 0 to 3" in way.prompts[0]
    assert "Reply with the number of one action" in way.news[1] and "FFFH" in way.news[2]
    assert played(stack, use, task, Heard("1", "2"), python=python) == 0.0  # into the hole
    assert played(stack, use + "&max_turns=2", task, Heard("1", "1"), python=python) == 0.0


@pytest.mark.parametrize(
    ("use", "fault"),
    [
        ("reasoning-gym:nothing", "no data set 'nothing'; it has"),
        ("reasoning-gym:countdown?sizes=3", "its settings are max_numbers"),
        ("reasoning-gym:countdown?difficulty=99", "difficulty must be at most"),
        ("reasoning-gym:coin_flip?size=0", "at least 1"),
        ("textarena:Nothing-v0", "no game 'Nothing-v0'"),
        ("textarena:TicTacToe-v0", "cannot be begun by one player"),
        ("gymnasium:Nothing-v0", "Nothing"),
        ("gymnasium:Pendulum-v1", "has actions of Box"),
        ("gymnasium:FrozenLake-v1?slippery=1", "unexpected keyword argument 'slippery'"),
        ("gymnasium:FrozenLake-v1?size=x", "size must be an integer"),
    ],
)
def test_an_environment_that_cannot_be_opened_is_refused_with_the_reason(
    use: str, fault: str, python: str
) -> None:
    with pytest.raises(TaskEnvironmentError, match=re.escape(fault)):
        tasks(use, python)
