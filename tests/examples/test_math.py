"""The math recipe: rows become tasks, replies in the form of R1-Zero are parsed, and GRPO trains.

PPO with a critic trains in `test_preset_runs.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from integration_support import running_stack
from math_tasks import tasks_of
from recipe_runs import train
from tokenizers import Tokenizer

from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.rewards import MathChecks
from areal_agents.user_functions import load_function

EXAMPLE = Path(__file__).parents[2] / "examples" / "math"
MODEL = EXAMPLE.parent / "search_agent" / "model"
AGENT = load_function(f"{EXAMPLE / 'agent.py'}:solve", AgentError).__globals__


def test_the_instruction_is_the_one_that_the_laptop_model_was_trained_with() -> None:
    chances = load_function(f"{EXAMPLE.parent / 'multi_turn_math' / 'chances.py'}:opening", AgentError)
    assert AGENT["INSTRUCTION"] == chances.__globals__["SYSTEM_PROMPT"]


def test_rows_of_the_data_sets_become_tasks() -> None:
    rows = [
        {"question": "How many?", "answer": "He has 1,000 + 5 = <<1000+5=1005>>1005.\n#### 1,005"},  # GSM8K
        {"problem": "Find x.", "answer": r"\frac{1}{2}", "solution": "…", "level": 3},  # MATH-500
        {"id": 60, "problem": "Find n.", "answer": "204", "url": "…"},  # AIME 2024
        {"question": "Which?", "answer": 27.0},  # AMC 2023
    ]
    tasks = tasks_of(rows)
    assert [task["answer"] for task in tasks] == ["1005", r"\frac{1}{2}", "204", "27.0"]
    assert [task["question"] for task in tasks] == ["How many?", "Find x.", "Find n.", "Which?"]
    assert [task["id"] for task in tasks] == ["0", "1", "2", "3"]
    assert all(set(task) == {"id", "question", "answer"} for task in tasks)
    with pytest.raises(ValueError, match="one of the columns question, problem; it has text, answer"):
        tasks_of([{"text": "How many?", "answer": "1"}])
    with pytest.raises(ValueError, match="one of the columns answer"):
        tasks_of([{"question": "How many?", "answer": ""}])


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [
        ("2 and 2.</think> <answer>4</answer>", "4", True),
        ("</think><answer></answer>\n", "", True),
        ("2 and 2.</think> <answer>4</answer> User: 3 + 3?", "4", False),
        ("2 and 2 make 4.", None, False),
        ("2 and 2.</think> <answer>4", None, False),
        ("2 and 2.</think> so <answer>4</answer>", "4", False),
        ("2 <answer>3</answer></think> <answer>4</answer>", "3", False),
        ("<think>2 and 2.</think> <answer>4</answer>", "4", False),
        ("2.</think> <answer>5</think> <answer>4</answer>", "5</think> <answer>4", False),
        ("2 and 2. <answer>4</answer>", "4", False),
    ],
)
def test_the_answer_and_the_form_of_a_reply_are_parsed(text: str, answer: str | None, form: bool) -> None:
    assert (AGENT["answer_of"](text), AGENT["has_form"](text)) == (answer, form)


def test_a_base_model_is_rewarded_for_the_form_and_for_the_answer(
    tmp_path: Path, patient_checks: MathChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AGENT, "CHECKS", patient_checks)
    replies = {
        "2 and 2.</think> <answer>4</answer>": {"format": 0.1, "correct": 1.0},
        "2 and 2.</think> <answer>5</answer>": {"format": 0.1, "correct": 0.0},
        "Easy. <answer>4</answer> So it is 4.": {"format": 0.0, "correct": 1.0},
        "It is 4.": {"format": 0.0, "correct": 0.0},
    }
    with running_stack(MODEL, tmp_path / "store.db") as stack, asyncio.Runner() as runner:
        for text, rewards in replies.items():
            opened = stack.open_episode([text])
            episode = Episode(opened["id"], opened["base_url"], opened["key"])
            given = runner.run(AGENT["zero"]({"question": "What is 2 + 2?", "answer": "4"}, episode))
            assert given == rewards, text
        (served,) = stack.engine.exchanges
    # The prompt has no chat format.
    shown = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(
        served.input_ids.tolist(), skip_special_tokens=False
    )
    assert shown == AGENT["ZERO_TEMPLATE"].format(question="What is 2 + 2?")


def test_the_recipe_trains(tmp_path: Path) -> None:
    run = train(EXAMPLE / "config.yaml", tmp_path / "run", "trainer.steps=1")
    assert [row["version"] for row in run.metrics] == [1]
    assert run.summary["heldout_after"] is not None
