"""The agent with a second chance sends exactly the tokens of the demonstrations, and the recipe trains."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration_support import Stack, running_stack
from recipe_runs import train
from students import CARELESS, Habits, Student, is_right, replies
from tokenizers import Tokenizer
from word_problems import heldout_tasks, sample_problem, train_tasks

from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.proxy import ProxyConfig
from areal_agents.rewards import MathChecks
from areal_agents.user_functions import load_function

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_turn_math"


def sums(question: str) -> set[str]:
    """The sums and differences that a question asks for, parsed from its words."""
    start, *amounts = map(int, re.findall(r"\d+", question))
    verbs = re.findall(r"(?:, |then )([a-z]+) \d", question)
    found, value = set(), start
    for verb, amount in zip(verbs, amounts, strict=True):
        adds = verb in ("buys", "finds", "wins", "gets")
        found.add(f"{value}{'+' if adds else '-'}{amount}")
        value += amount if adds else -amount
    return found | {f"={value}"}


def test_no_sum_of_a_held_out_problem_is_in_training() -> None:
    train_, heldout = train_tasks(), heldout_tasks()
    assert len({task["question"] for task in train_ + heldout}) == len(train_) + len(heldout)
    in_training: set[str] = set()
    for task in train_:
        found = sums(task["question"])
        assert f"={task['answer']}" in found and len(found) == 3
        in_training |= {one for one in found if not one.startswith("=")}
    assert not any(in_training & sums(task["question"]) for task in heldout)
    assert heldout == heldout_tasks() and train_ != train_tasks(seed=1)


def test_the_careless_student_is_often_wrong_and_the_careful_one_is_right_in_the_end() -> None:
    rng = random.Random(0)
    problems = [sample_problem(rng, held_out=False) for _ in range(300)]
    said = [(problem, *replies(problem, CARELESS, rng)) for problem in problems]
    firsts = [is_right(texts[0], problem) for problem, texts, _ in said]
    assert 0.15 < sum(firsts) / 300 < 0.4
    again = [texts for problem, texts, _ in said if len(texts) == 2]
    assert len(again) == 300 - sum(firsts)
    assert 0.4 < sum(first == second for first, second in again) / len(again) < 0.9
    for _ in range(50):
        problem = sample_problem(rng, held_out=True)
        texts, untrained = replies(problem, Habits(mishap=0.5), rng)
        assert is_right(texts[-1], problem) and untrained == set(range(len(texts) - 1))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    store = tmp_path_factory.mktemp("chances") / "store.db"
    with running_stack(EXAMPLE / "model", store, ProxyConfig(reasoning="keep")) as running:
        yield running


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One event loop, because the agent keeps one HTTP client for all episodes."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize(
    ("chances", "rewards"),
    [
        ([True], {"first_chance": 1.0}),
        ([False, True], {"first_chance": 0.0, "second_chance": 0.9}),
        ([False, False], {"first_chance": 0.0, "second_chance": 0.0}),
    ],
)
def test_an_episode_is_played_as_it_is_demonstrated(
    chances: list[bool],
    rewards: dict[str, float],
    stack: Stack,
    loop: asyncio.Runner,
    patient_checks: MathChecks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    converse = load_function(f"{EXAMPLE / 'agent.py'}:converse", AgentError)
    monkeypatch.setitem(converse.__globals__, "CHECKS", patient_checks)
    problem = sample_problem(random.Random(7), held_out=True)

    def said(seed: int) -> list[str]:
        return replies(problem, CARELESS, random.Random(seed))[0]

    seed = next(n for n in range(1000) if [is_right(text, problem) for text in said(n)] == chances)
    student = Student(Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json")))
    shown = student.demonstrate(problem, CARELESS, random.Random(seed))
    opened = stack.open_episode(said(seed))
    agent = load_function(f"{EXAMPLE / 'agent.py'}:two_chances", AgentError)
    task = {"question": problem.question, "answer": str(problem.answer)}
    given = loop.run(agent(task, Episode(opened["id"], opened["base_url"], opened["key"])))
    assert given == rewards
    turns = stack.turns(opened)
    assert [turn["forked_from"] for turn in turns] == [None] * len(chances)
    assert (*turns[-1]["prompt_ids"], *turns[-1]["token_ids"]) == shown.ids


def test_the_recipe_trains(tmp_path: Path) -> None:
    run = train(EXAMPLE / "config.yaml", tmp_path / "run", "trainer.steps=2")
    assert [row["version"] for row in run.metrics] == [1, 2]
    assert any(row["tokens"] for row in run.metrics)
    assert {"first_chance", "second_chance"} <= set(run.metrics[0]["rewards_by_name"])
    assert run.summary["heldout_after"] is not None
