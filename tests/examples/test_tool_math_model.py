"""The simulated students of the math recipe with Python, and the model trained to imitate them."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from calculating import opening
from integration_support import Stack, running_stack
from number_problems import Problem, heldout_tasks, sample_problem, train_tasks
from python_tool import PRINTED_NOTHING, PYTHON_TOOL
from tokenizers import Tokenizer
from tool_students import CAREFUL, CARELESS, Habits, Student, Work, boxed, call, work
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from areal_agents.core.messages import Message
from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.rendering import ChatRenderer
from areal_agents.rewards import MathChecks
from areal_agents.user_functions import load_function

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_math"

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


def program(question: str) -> str:
    """The program that a question asks for, parsed from its words."""
    start, changes = re.fullmatch(r"\w+ has (\d+) \w+, (.*)\. How many \w+ are left\?", question).groups()
    written = start
    for change in changes.split(", then "):
        verb, first, second = re.fullmatch(r"(\w+) (\d+)(?: boxes of (\d+))?", change).groups()
        written += "+" if verb in ("buys", "finds", "wins", "gets") else "-"
        written += first if second is None else f"{first}*{second}"
    return written


def test_no_program_of_a_held_out_problem_is_in_training() -> None:
    train_, heldout = train_tasks(), heldout_tasks()
    assert len({task["question"] for task in train_ + heldout}) == len(train_) + len(heldout)
    for task in train_ + heldout:
        assert str(eval(program(task["question"]))) == task["answer"]
    in_training = {program(task["question"]) for task in train_}
    assert not in_training & {program(task["question"]) for task in heldout}
    assert heldout == heldout_tasks() and train_ != train_tasks(seed=1)


def works(habits: Habits, count: int) -> list[tuple[Problem, Work]]:
    rng = random.Random(0)
    problems = [sample_problem(rng, held_out=True) for _ in range(count)]
    return [(problem, work(problem, habits, rng)) for problem in problems]


def test_the_careful_student_is_always_right_and_recovers(patient_checks: MathChecks) -> None:
    done = works(CAREFUL, 200)
    for problem, one in done:
        assert patient_checks.equal(one.replies[-1], str(problem.answer))
        assert one.replies[-2:] == [call(f"print({problem.expression})"), boxed(problem.answer)]
        assert one.mishaps == set(range(len(one.replies) - 2))
    assert 20 < sum(bool(one.mishaps) for _, one in done) < 60


def test_the_careless_student_is_seldom_right_and_only_with_the_tool(patient_checks: MathChecks) -> None:
    done = works(CARELESS, 300)
    right = [patient_checks.equal(one.replies[-1], str(problem.answer)) for problem, one in done]
    assert 0.05 < sum(right) / len(done) < 0.25
    used = [bool(one.told) for _, one in done]
    assert 0.2 < sum(used) / len(done) < 0.4
    assert not any(is_right and not with_tool for is_right, with_tool in zip(right, used, strict=True))
    with_tool = [(problem, one) for problem, one in done if one.told]
    assert any(one.told == [PRINTED_NOTHING] for _, one in with_tool)
    printed = [(problem, one) for problem, one in with_tool if one.told != [PRINTED_NOTHING]]
    assert any(one.told != [str(problem.answer)] for problem, one in printed), "a verb is misread"
    assert any(one.replies[-1] != boxed(int(one.told[0])) for _, one in printed), "a digit is miscopied"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(EXAMPLE / "model", tmp_path_factory.mktemp("tool_math") / "store.db") as running:
        yield running


@needs_bubblewrap
@pytest.mark.usefixtures("patient_tool_math")
@pytest.mark.parametrize(
    ("habits", "calls", "reward"),
    [
        (Habits(), 1, 1.0),
        (Habits(mishap=1.0), 2, 1.0),
        (Habits(blurt=1.0), 0, 0.0),
        (Habits(in_head=1.0), 0, 0.0),
        (Habits(misread=1.0, misread_hard=1.0), 1, 0.0),
        (Habits(forget_print=1.0), 1, 0.0),
        (Habits(miscopy=1.0), 1, 0.0),
    ],
)
def test_an_episode_is_played_as_it_is_demonstrated(
    habits: Habits, calls: int, reward: float, stack: Stack, tool_math_loop: asyncio.Runner
) -> None:
    problem = sample_problem(random.Random(7), held_out=True)
    student = Student(Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json")))
    shown = student.demonstrate(problem, habits, random.Random(0))
    opened = stack.open_episode(work(problem, habits, random.Random(0)).replies)
    agent = load_function(f"{EXAMPLE / 'agent.py'}:calculating_agent", AgentError)
    task = {"question": problem.question, "answer": str(problem.answer)}
    given = tool_math_loop.run(agent(task, Episode(opened["id"], opened["base_url"], opened["key"])))
    assert given == reward
    turns = stack.turns(opened)
    assert [turn["forked_from"] for turn in turns] == [None] * (calls + 1)
    assert (*turns[-1]["prompt_ids"], *turns[-1]["token_ids"]) == shown.ids


def test_the_model_is_small_and_has_a_token_for_each_digit() -> None:
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.float32)
    assert isinstance(model, Qwen3ForCausalLM)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
    assert model.config.vocab_size == tokenizer.get_vocab_size()
    digits = [tokenizer.encode(digit).ids for digit in "3471"]
    assert [len(ids) for ids in digits] == [1] * 4
    assert tokenizer.encode("3471").ids == sum(digits, [])


def test_the_model_completes_a_demonstrated_tool_call_correctly() -> None:
    """The prompt contains the beginning of a call, which the model completes greedily. It succeeds only with
    the tokenizer and the prompt that it was trained with."""
    renderer = ChatRenderer.from_folder(EXAMPLE / "model")
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.float32).eval()
    rng = random.Random(3)
    right = 0
    for _ in range(20):
        problem = sample_problem(rng, held_out=True)
        first = [Message.from_dict(message) for message in opening(problem.question)]
        prompt = renderer.render(first, [PYTHON_TOOL]).tolist()
        wanted = call(f"print({problem.expression})")
        begun = wanted[: wanted.index("print") + len("print")]
        ids = torch.tensor([prompt + tokenizer.encode(begun).ids])
        reply = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        said = tokenizer.decode(reply[0, len(prompt) :].tolist(), skip_special_tokens=True)
        right += [c for c in said if c.isdigit()] == [c for c in wanted if c.isdigit()]
    assert right >= 10  # with another prompt or tokenizer, none is right
