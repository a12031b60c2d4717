"""The math recipe with Python: the limits of programs, episodes, and training."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
import python_tool
from integration_support import running_stack
from python_tool import OUTPUT_BYTES, PRINTED_NOTHING, PythonTool
from recipe_runs import train
from tokenizers import Tokenizer

from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.user_functions import load_function

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_math"
MODEL = EXAMPLE / "model"

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


ENDLESS = "while True: pass"
ENDLESS_S = 0.5
TOLD = {  # all that the model is told of a program
    "print(347 + 58 * 24)": "1739",
    "x = 1": PRINTED_NOTHING,
    "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint(1)": "1",
    ENDLESS: f"Error: stopped after {ENDLESS_S:g} seconds.",
    "import os\nprint([n for n in os.environ if 'AREAL' in n or 'OPENAI' in n])": "[]",
    "import os, signal\nos.kill(1, signal.SIGKILL)\nprint('alive')": "alive",
    "open('kept', 'w').write('1')\nprint(open('kept').read())": "1",
    "print(open('kept').read())": "1",
}
FAILED = "\nError: exit status 1."
PARTS = {  # what the model is told among other text, and how that ends
    "print('x' * 100_000)": (f"[{100_001 - OUTPUT_BYTES} bytes before this are left out]\nxxx", "xxx"),
    "x = b'x' * 10**9": ("", "Error: it needs more than 512 MiB of memory."),
    "1 / 0": ("ZeroDivisionError: division by zero", FAILED),
    "import os\nwhile True: os.fork()": ("Resource temporarily unavailable", FAILED),
    f"print(open({str(EXAMPLE / 'agent.py')!r}).read())": ("FileNotFoundError", FAILED),
    "import socket\nsocket.create_connection(('1.1.1.1', 80), 2)": ("Network is unreachable", FAILED),
}


@needs_bubblewrap
@pytest.mark.usefixtures("patient_tool_math")
async def test_the_model_sees_the_result_of_any_program_and_the_next_program_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = PythonTool()
    try:
        for code, (part, end) in PARTS.items():
            told = await tool.run(code)
            assert part in told and told.endswith(end), (code, told)
            assert len(told) < 3 * OUTPUT_BYTES
        for code, expected in TOLD.items():
            with monkeypatch.context() as patch:
                if code == ENDLESS:
                    patch.setattr(python_tool, "TIME_S", ENDLESS_S)
                assert await tool.run(code) == expected, code
        assert await tool.run(None) == "Error: python needs code, a string."
    finally:
        await tool.end()
    other = PythonTool()
    try:
        assert "FileNotFoundError" in await other.run("print(open('kept').read())")
    finally:
        await other.end()


def call(code: str, name: str = "python") -> str:
    arguments = json.dumps({"name": name, "arguments": {"code": code}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


@needs_bubblewrap
@pytest.mark.usefixtures("patient_tool_math")
def test_episodes_are_played_and_recorded_as_one_sequence(
    tmp_path: Path, tool_math_loop: asyncio.Runner
) -> None:
    agent = load_function(f"{EXAMPLE / 'agent.py'}:calculating_agent", AgentError)
    cases: list[tuple[list[str], list[str], float]] = [
        ([call("print(6 * 7)"), r"It is \boxed{42}."], ["42"], 1.0),
        ([call("6 * 7"), r"It is \boxed{41}."], ["It printed nothing."], 0.0),
        ([call("a", name="bash"), r"\boxed{42}"], ["Error: there is no tool bash; the tool is python."], 1.0),
        ([r"\boxed{42}"], [], 1.0),
        ([r"\boxed{84/2}"], [], 0.0),  # the expression is not evaluated
        (["It is 84/2\nas said."], [], 0.0),
        ([call("print(1)")] * 5, ["1"] * 3, 0.0),  # the fourth call gets no result
    ]
    task = {"question": "What is 6 times 7?", "answer": "42"}
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    with running_stack(MODEL, tmp_path / "store.db") as stack:
        for replies, results, reward in cases:
            opened = stack.open_episode(replies)
            given = tool_math_loop.run(agent(task, Episode(opened["id"], opened["base_url"], opened["key"])))
            turns = stack.turns(opened)
            assert given == reward, replies
            assert len(turns) == min(len(replies), 4)
            assert [turn["forked_from"] for turn in turns] == [None] * len(turns)
            shown = tokenizer.decode(turns[-1]["prompt_ids"], skip_special_tokens=False)
            assert re.findall(r"<tool_response>\n(.*?)\n</tool_response>", shown) == results


@needs_bubblewrap
def test_the_recipe_trains(tmp_path: Path) -> None:
    run = train(EXAMPLE / "config.yaml", tmp_path / "run", "trainer.steps=2")
    assert [row["version"] for row in run.metrics] == [1, 2]
    assert any("python" in row["tool_calls_by_name"] for row in run.metrics)
    assert run.summary["heldout_after"] is not None
