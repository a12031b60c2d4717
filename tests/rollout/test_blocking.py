"""The watch over the event loop: it reports agents that block, but not the imports of their modules.

Each case with an import is a separate program, because a module is imported only once. The slow package is in
a folder of installed packages, and either sleeps or computes in C without releasing the GIL.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_agents.rollout.agents.blocking import BlockingWatch

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import asyncio, logging, sys
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.blocking import BlockingWatch
from areal_agents.user_functions import load_function
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
logging.getLogger("asyncio").setLevel(logging.WARNING)
async def main():
    with BlockingWatch(lambda said: print("REPORTED", said, flush=True), blocked_s=0.8, adds_up=True):
        await asyncio.sleep(0.2)
        await load_function("agent.py:agent", AgentError)()
        await asyncio.sleep(0.5)
asyncio.run(main())
print("ended")
"""
SLOW = {  # for 1.3 s
    "sleeps": "import time\ntime.sleep(1.3)\n",
    "computes": """
import time
began = time.thread_time()
sum(range(5_000_000))
sum(range(int(5_000_000 * 1.3 / (time.thread_time() - began))))
""",
}
TOP = "import slow\nasync def agent(): pass\n"
WITHIN = "async def agent():\n    import slow\n"
CALLS = "import slow_caller\nasync def agent(): pass\n"  # user code runs during the import
IN_A_THREAD = """
import asyncio, importlib
async def agent():
    await asyncio.to_thread(importlib.import_module, "slow")
"""
WAITS_FOR_A_THREAD = """
import asyncio, importlib
async def agent():
    thread = asyncio.create_task(asyncio.to_thread(importlib.import_module, "slow"))
    await asyncio.sleep(0.2)
    import slow
    await thread
"""
WITH_OTHER_WORK = """
import time
async def agent():
    time.sleep(0.2)
    import slow
    time.sleep(0.2)
"""
IMPORTS = {
    "top": TOP,
    "within": WITHIN,
    "calls": CALLS,
    "thread": IN_A_THREAD,
    "waits": WAITS_FOR_A_THREAD,
    "work": WITH_OTHER_WORK,
}


def outcome_of(folder: Path, agent: str, slow: str) -> str:
    """Return the output of a program that runs `agent`; its package `slow` has the code SLOW[slow]."""
    package = folder / "site-packages/slow/__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(SLOW[slow])
    (folder / "slow_caller.py").write_text("def build():\n    import slow\nbuild()\n")
    (folder / "agent.py").write_text(agent)
    paths = (str(REPOSITORY), str(package.parents[1]), os.environ.get("PYTHONPATH", ""))
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("ended\n")
    return process.stdout


@pytest.mark.parametrize(
    ("agent", "slow"),
    # The other case is in the next test.
    [(agent, slow) for agent in IMPORTS for slow in SLOW if (agent, slow) != ("within", "sleeps")],
)
def test_the_import_of_a_module_does_not_count_as_a_block(tmp_path: Path, agent: str, slow: str) -> None:
    assert "REPORTED" not in outcome_of(tmp_path, IMPORTS[agent], slow)


def test_an_import_that_holds_the_loop_is_logged_once_with_its_line(tmp_path: Path) -> None:
    output = outcome_of(tmp_path, WITHIN, "sleeps")
    assert "REPORTED" not in output
    assert output.count("the event loop waits for an import at") == 1
    assert f"waits for an import at {tmp_path}/agent.py, line 2, in agent: import slow\n" in output


@pytest.mark.parametrize("how", ["time.sleep(2.0)", "sum(range(180_000_000))"])
def test_an_agent_that_blocks_after_an_import_is_reported(tmp_path: Path, how: str) -> None:
    agent = f"import time\nasync def agent():\n    import slow\n    {how}\n    time.sleep(0.2)\n"
    output = outcome_of(tmp_path, agent, "sleeps")
    assert output.count("REPORTED the agent has blocked its event loop for 0.8 s") == 1
    assert f"{tmp_path}/agent.py, line 4, in agent: {how}. While" in output


async def test_loading_before_the_loop_first_runs_does_not_count_as_a_block() -> None:
    """A run reads its data set and imports its agent before its loop runs."""
    reports: list[str] = []
    with BlockingWatch(reports.append, blocked_s=0.6):
        time.sleep(1.0)  # noqa: ASYNC251
        await asyncio.sleep(0.5)
        assert not reports
        time.sleep(2.0)  # noqa: ASYNC251
    assert len(reports) == 1
