"""The code recipe: its problems can be solved, only solutions earn the reward, and the recipe trains."""

from __future__ import annotations

import asyncio
import base64
import inspect
import itertools
import json
import pickle
import random
import shutil
import zlib
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from coder import NO_PROGRAM, PROGRAMS, RUNNER, coder, one_shot, solved, tried
from integration_support import Stack, running_stack
from lists import heldout_tasks, reply_with, sample_problem, train_tasks
from problems import LARGEST_TEST, of_deepcoder, of_livecodebench, own, read_cases
from programmers import CAREFUL, CARELESS, Habits, Played, Programmer, play, run_here, sample_task, told
from recipe_runs import train
from scripted_runs import trained_step
from tokenizers import Tokenizer

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.proxy import ProxyConfig
from areal_agents.rewards import FinishedEpisode, fenced, read_tests
from areal_agents.rollout.agents.environment_agent import environment_agent, environment_tasks
from areal_agents.testing import ScriptedCall
from areal_agents.user_functions import load_function
from integrations.conversations import call

EXAMPLE = Path(__file__).parents[2] / "examples" / "code"
MODEL = EXAMPLE / "model"
EPISODE_S = 120
T = TypeVar("T")

one_loop = pytest.mark.asyncio(loop_scope="module")  # the agent and its reward keep sandboxes in one loop
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="make sandbox-tools installs bwrap")


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Lets a program of the policy or of the reward take long."""
    rewarding = inspect.getclosurevars(solved).nonlocals["runner"]
    with pytest.MonkeyPatch.context() as patch:
        for runner in (RUNNER, rewarding):
            patch.setattr(runner, "_time_s", 60.0)
        yield


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    store = tmp_path_factory.mktemp("code") / "store.db"
    with running_stack(MODEL, store, ProxyConfig(reasoning="keep")) as stack:
        yield stack


def answered(task: dict[str, Any], reply: str) -> FinishedEpisode:
    return FinishedEpisode("e", task, [[{"role": "assistant", "content": reply}]], "finished", {})


async def results_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls that use a sandbox each, four at a time."""
    places = asyncio.Semaphore(4)

    async def result(call: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await call

    return list(await asyncio.gather(*map(result, calls)))


async def rewards_of(replies: Sequence[tuple[dict[str, Any], str]]) -> list[float]:
    return await results_of(solved(answered(task, reply)) for task, reply in replies)


@one_loop
async def test_every_own_problem_is_solved_by_its_solution() -> None:
    problems = own()
    assert len({problem["id"] for problem in problems}) == 20
    assert {test["testtype"] for problem in problems for test in problem["tests"]} == {"stdin", "functional"}
    assert await rewards_of([(problem, problem["solution"]) for problem in problems]) == [1.0] * 20
    # A program that has memorised the public tests fails the hidden ones.
    stdin = next(problem for problem in problems if not problem["func_name"])
    known = {test["input"]: test["output"] for test in stdin["public_tests"]}
    by_heart = reply_with(f"import sys\nprint({known}.get(sys.stdin.read(), ''))\n")
    assert await rewards_of([(stdin, by_heart), (stdin, "It is solved.")]) == [0.0, 0.0]


@one_loop
async def test_generated_problems_are_solved_by_their_solution_and_by_no_mutant() -> None:
    heldout, train = heldout_tasks(), train_tasks()
    assert (len(heldout), len(train)) == (256, 1000) and heldout == heldout_tasks()
    assert not {task["question"] for task in heldout} & {task["question"] for task in train}
    task = heldout[0]
    rng = random.Random("heldout/0")  # the same task
    problem = sample_problem(rng, held_out=True)
    assert problem.question == task["question"]
    replies = [task["solution"], *(reply_with(m.program) for m in rng.sample(list(problem.mutants()), 5))]
    assert await rewards_of([(task, reply) for reply in replies]) == [1.0] + [0.0] * 5


def demonstrated(habits: Habits, *, count: int) -> list[tuple[dict[str, Any], Played]]:
    """Held-out tasks, each with the demonstration of a programmer with these habits."""
    rng = random.Random(0)
    sampled = [sample_task(rng, held_out=True) for _ in range(count)]
    return [(task, play(problem, task, habits, rng)) for problem, task in sampled]


@one_loop
async def test_the_careful_programmer_solves_every_problem_and_mishaps_are_untrained() -> None:
    episodes = [*demonstrated(CAREFUL, count=8), *demonstrated(Habits(mishap=1.0), count=4)]
    assert {len(played.replies) for _, played in episodes} >= {1, PROGRAMS}
    assert all(played.untrained == set(range(len(played.replies) - 1)) for _, played in episodes)
    assert await rewards_of([(task, played.replies[-1]) for task, played in episodes]) == [1.0] * 12
    mishaps = [(task, reply) for task, played in episodes for reply in played.replies[:-1]]
    assert await rewards_of(mishaps) == [0.0] * len(mishaps)


@one_loop
async def test_every_habit_of_the_careless_programmer_costs_the_reward() -> None:
    rng = random.Random(0)
    problem, task = sample_task(rng, held_out=True)
    while (problem.aggregate, problem.condition) != ("sorted", "n >= {}"):
        problem, task = sample_task(rng, held_out=True)
    mistakes = [
        Habits(misread=1.0), Habits(forget_change=1.0), Habits(leave_unsorted=1.0), Habits(no_block=1.0)
    ]  # fmt: skip
    last = [play(problem, task, habits, rng).replies[-1] for habits in (*mistakes, Habits())]
    assert len(set(last)) == 5 and await rewards_of([(task, reply) for reply in last]) == [0.0] * 4 + [1.0]


def solved_here(task: dict[str, Any], reply: str) -> bool:
    """Whether the reply of a programmer earns the reward, computed without a sandbox."""
    program = fenced(reply)
    return program is not None and all(run_here(program, test).passed for test in read_tests(task))


@one_loop
async def test_the_careless_programmer_solves_some_and_repeats_most_failures() -> None:
    episodes = demonstrated(CARELESS, count=300)
    last = [(task, played.replies[-1]) for task, played in episodes]
    rewards = [float(solved_here(*one)) for one in last]
    assert 0.1 < sum(rewards) / 300 < 0.5 and set(rewards[:16]) == {0.0, 1.0}
    assert await rewards_of(last[:16]) == rewards[:16]
    pairs = [pair for _, played in episodes for pair in itertools.pairwise(played.replies)]
    assert 0.5 < sum(first == second for first, second in pairs) / len(pairs) < 0.9
    assert not any(played.untrained for _, played in episodes)


@pytest.mark.parametrize("habits", [CAREFUL, CARELESS], ids=["careful", "careless"])
@one_loop
async def test_demonstrations_show_the_reports_of_the_sandbox(habits: Habits) -> None:
    episodes = demonstrated(habits, count=16)
    said = [(task, reply) for task, played in episodes for reply in played.replies]
    shown = [told(task, reply) for task, reply in said]
    assert NO_PROGRAM in shown or habits is CAREFUL
    assert {task["form"] for task, _ in said} == {"stdin", "functional"} and None in shown
    assert await results_of(tried(task, reply) for task, reply in said) == shown
    for task, played in episodes:
        assert played.reports == [told(task, reply) for reply in played.replies[: len(played.reports)]]


def test_rows_of_livecodebench_are_read_in_both_of_its_forms() -> None:
    tests = [{"input": "1", "output": "2", "testtype": "functional", "more": None}]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()
    row = {
        "question_id": "3", "question_content": " Add one.\n", "difficulty": "easy", "platform": "leetcode",
        "starter_code": "class Solution:", "metadata": '{"func_name": "add"}',
        "public_test_cases": json.dumps(tests), "private_test_cases": packed,
    }  # fmt: skip
    test = {"input": "1", "output": "2", "testtype": "functional"}
    assert of_livecodebench(row) == {
        "id": "3", "question": "Add one.", "starter_code": "class Solution:", "func_name": "add",
        "public_tests": [test], "tests": [test, test], "difficulty": "easy",
    }  # fmt: skip
    harmful = base64.b64encode(zlib.compress(pickle.dumps(shutil.rmtree))).decode()
    with pytest.raises(pickle.UnpicklingError, match=r"must not import shutil\.rmtree"):
        read_cases(harmful)


def test_rows_of_every_subset_of_deepcoder_are_read() -> None:
    pairs = [(f"{n}\n", f"{n + 1}\n") for n in range(6)]
    tests = [{"input": given, "output": wanted, "testtype": "stdin"} for given, wanted in pairs]
    forms: dict[str, Any] = {
        "primeintellect": [{"type": "stdin_stdout", "input": given, "output": out} for given, out in pairs],
        "taco": {"inputs": [given for given, _ in pairs], "outputs": [out for _, out in pairs]},
        "lcbv5": [{**test, "metadata": {"func_name": None}} for test in tests],
        "codeforces": [{"input": given, "output": out} for given, out in pairs],
    }
    for name, form in forms.items():
        task = of_deepcoder({"problem": "Add one. ", "tests": json.dumps(form)}, name)
        assert task is not None
        assert (task["id"], task["question"], task["func_name"]) == (name, "Add one.", "")
        assert (task["public_tests"], task["tests"]) == (tests[:2], tests)
    called = [{**test, "testtype": "functional", "metadata": {"func_name": "add"}} for test in tests]
    task = of_deepcoder({"problem": "p", "starter_code": "def add(n):", "tests": json.dumps(called)}, "f")
    assert task is not None and (task["func_name"], task["starter_code"]) == ("add", "def add(n):")

    wrapped = {"fn_name": "add", "inputs": [[1]] * 6, "outputs": [[2]] * 6}
    large = [{"input": "1" * LARGEST_TEST, "output": "1"}] * 9
    for form in (wrapped, large, forms["codeforces"][:4]):
        assert of_deepcoder({"problem": "p", "tests": json.dumps(form)}, "x") is None


def text_of(ids: Sequence[int]) -> str:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(list(ids), skip_special_tokens=False)


async def played_turns(
    stack: Stack, task: dict[str, Any], replies: Sequence[str], agent: Any = coder
) -> list[dict[str, Any]]:
    """The recorded turns of an episode in which the model gives these replies."""
    opened = stack.open_episode(replies)
    async with asyncio.timeout(EPISODE_S):
        await agent(task, Episode(opened["id"], opened["base_url"], opened["key"]))
    return stack.turns(opened)


@one_loop
async def test_a_program_is_repaired_in_one_branch(stack: Stack) -> None:
    """The policy sees the failed test, or that its reply has no program; the last reply is not run."""
    task = heldout_tasks()[0]
    wrong, right = reply_with(f"{task['starter_code']} return 0"), task["solution"]
    first = task["public_tests"][0]
    failed = f"It fails test 1. Input:\n{first['input']}\nExpected:\n{first['output']}\nGot:\n0"
    turns = await played_turns(stack, task, [wrong, "I give up.", right])
    assert len(turns) == PROGRAMS and [turn["forked_from"] for turn in turns] == [None] * PROGRAMS
    seen = text_of(turns[-1]["prompt_ids"])
    assert failed in seen and NO_PROGRAM in seen and task["question"] in seen
    assert len(await played_turns(stack, task, [right])) == 1


@one_loop
async def test_a_program_that_raises_shows_its_error_and_one_shot_shows_nothing(stack: Stack) -> None:
    task = next(problem for problem in own() if problem["id"] == "tram-fare")
    fails = reply_with("1 / 0\n")
    turns = await played_turns(stack, task, [fails, task["solution"]])
    text = text_of(turns[-1]["prompt_ids"])
    assert "Error:" in text and "ZeroDivisionError: division by zero" in text and len(turns) == 2
    assert len(await played_turns(stack, task, [fails], one_shot)) == 1


@one_loop
async def test_an_episode_is_played_as_it_is_demonstrated(stack: Stack) -> None:
    """The starting model was trained on exactly the tokens that the agent and the proxy produce."""
    programmer = Programmer(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    for is_function in (False, True):
        rng = random.Random(int(is_function))
        while True:
            problem, task = sample_task(rng, held_out=True)
            state = rng.getstate()
            played = play(problem, task, CARELESS, rng)
            if len(played.replies) == PROGRAMS and problem.is_function == is_function:
                break
        rng.setstate(state)
        shown = programmer.demonstrate(problem, task, CARELESS, rng)
        turns = await played_turns(stack, task, played.replies)
        assert [turn["forked_from"] for turn in turns] == [None] * PROGRAMS
        assert (*turns[-1]["prompt_ids"], *turns[-1]["token_ids"]) == shown.ids
        assert shown.ids[: len(programmer.prefix)] == tuple(programmer.prefix)


def test_the_shipped_tokenizer_equals_the_generated_one() -> None:
    made = load_function(f"{EXAMPLE / 'make_model.py'}:make_tokenizer", AgentError)()
    assert made.to_str() == Tokenizer.from_file(str(MODEL / "tokenizer.json")).to_str()
    config = json.loads((MODEL / "config.json").read_text())
    assert config["vocab_size"] == made.get_vocab_size()


HARBOR = f"harbor:{EXAMPLE / 'folders'}?held_out=0&isolation=bubblewrap"
ANALYSIS = """
import collections
errors, sent = collections.Counter(), collections.Counter()
for line in open('access.log'):
    _, client, _, status, size = line.split()
    errors[client] += int(status) >= 500
    sent[client] += int(size)
with open('report.txt', 'w') as report:
    for client in sorted(errors, key=lambda c: (-errors[c], c)):
        if errors[client]:
            print(client, errors[client], sent[client], file=report)
"""
SORTED = "sed -i 's/key=lambda item: item.1., reverse=True/key=lambda item: (-item[1], item[0])/' budget.py"
SUMMED = "sed -i 's/abs(int(cents))/int(cents)/' budget.py"
PRINTED = (
    'sed -i \'s/return f.*/sign = "-" if cents < 0 else ""\\n    '
    'return f"{sign}{abs(cents) \\/\\/ 100}.{abs(cents) % 100:02}"/\' budget.py'
)


@pytest.mark.parametrize(
    ("id", "work"),
    [("access-log", [f"python3 - <<'E'{ANALYSIS}E"]), ("broken-budget", [SORTED, SUMMED, PRINTED])],
)
async def test_task_folders_of_harbor_reward_only_a_complete_solution(
    stack: Stack, id: str, work: list[str]
) -> None:
    environment = EnvironmentConfig(use=HARBOR)
    task = next(task for task in environment_tasks(environment, "train") if task["id"] == id)
    agent = environment_agent(environment)
    rewards = []
    try:
        for commands in (work, work[:-1]):
            calls = [call("bash", json.dumps({"command": command})) for command in commands]
            opened = stack.open_episode([*calls, "It is done."])
            async with asyncio.timeout(EPISODE_S):
                ep = Episode(opened["id"], opened["base_url"], opened["key"])
                rewards.append(await agent.run(task, ep))
    finally:
        await agent.close()
    assert rewards[0] == 1.0 > rewards[1]


def test_the_example_trains_on_its_rewards(tmp_path: Path) -> None:
    """One step on a group in which half of the episodes solve their problem, played by a scripted engine."""
    problems = {task["question"]: task for task in train_tasks()}
    solves = itertools.cycle([True, False])

    def programs(call: ScriptedCall) -> str:
        (task,) = [task for question, task in problems.items() if f"\n{question}\n" in call.prompt_text]
        if NO_PROGRAM in call.prompt_text:
            return reply_with("pass\n")
        return str(task["solution"]) if next(solves) else "I give up."

    row = trained_step(EXAMPLE / "config.yaml", MODEL, programs, tmp_path / "run", ["rollout.group_size=4"])
    assert (row["version"], row["groups_bad"], row["reward_mean"]) == (1, 0, 0.5)
    assert row["tokens"] > 0 and row["grad_norm"] > 0


def test_the_recipe_trains(tmp_path: Path) -> None:
    run = train(EXAMPLE / "config.yaml", tmp_path / "run", "trainer.steps=2")
    assert [row["version"] for row in run.metrics] == [1, 2]
    assert any(row["tokens"] for row in run.metrics)
    assert run.summary["heldout_after"] is not None
