from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_agents.errors import AgentError
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.command import CommandAgent
from areal_agents.rollout.agents.coroutine import CoroutineAgent
from areal_agents.rollout.agents.worker_pool import WorkerAgent
from areal_agents.user_functions import load_function

AGENTS = Path(__file__).parent / "rollout_agents.py"


async def test_the_form_of_an_agent_decides_where_it_runs() -> None:
    assert isinstance(load_agent(f"{AGENTS}:good"), CoroutineAgent)
    assert isinstance(load_agent(f"{AGENTS}:undecorated"), CoroutineAgent)
    assert isinstance(load_agent({"command": "python agent.py"}), CommandAgent)
    worker = load_agent(f"{AGENTS}:sync_good", workers=3)
    assert isinstance(worker, WorkerAgent) and worker.capacity == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "rollout_agents.py",
            "expected module:function or path/to/file.py:function, got 'rollout_agents.py'",
        ),
        ("nowhere.py:agent", "there is no file .*nowhere.py"),
        (f"{AGENTS}:god", "has no function 'god'; it has .*good"),
        (f"{AGENTS}:NOT_A_FUNCTION", "must be a function, got int"),
        (f"{AGENTS}:one_argument", r"cannot be called as one_argument\(task, ep\)"),
        ({"command": " "}, "an agent must be module:function, file.py:function, {command: …} or {cli: …}"),
        ({"cmd": "python"}, "an agent must be"),
    ],
)
def test_agents_that_cannot_be_loaded_are_refused(spec: str | dict[str, str], message: str) -> None:
    with pytest.raises(AgentError, match=message):
        load_agent(spec)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import no_such_package",
            r"ModuleNotFoundError: No module named 'no_such_package' \(.*broken.py, line 1\)",
        ),
        ("x = 1\ny = x / 0", r"ZeroDivisionError: division by zero \(.*broken.py, line 2\)"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(2)", "SystemExit: 2"),
    ],
)
def test_the_error_of_an_agent_that_cannot_be_imported_names_the_line(
    tmp_path: Path, code: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(AgentError, match=f"cannot import .*broken.py: {message}"):
        load_function(f"{tmp_path / 'broken.py'}:f", AgentError)


def test_files_with_the_same_name_do_not_shadow_each_other(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name_agent.py").write_text(f"def which(): return {name!r}")
    found = [
        load_function(f"{tmp_path / name}/same_name_agent.py:which", AgentError) for name in ("one", "two")
    ]
    assert [which() for which in found] == ["one", "two"]
    again = load_function(f"{tmp_path}/two/same_name_agent.py:which", AgentError)
    assert again is found[1]


def test_a_file_named_like_a_library_is_still_found(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def agent(task, ep): return 'mine'")
    assert load_function(f"{tmp_path / 'json.py'}:agent", AgentError)(None, None) == "mine"
    assert sys.modules["json"].dumps({}) == "{}"


def test_a_file_that_another_file_imports_is_loaded_only_once(tmp_path: Path) -> None:
    (tmp_path / "shared_module_of_test.py").write_text("STATE = []\ndef add(): STATE.append(1)")
    (tmp_path / "user_module_of_test.py").write_text(
        "import shared_module_of_test\ndef read(): return shared_module_of_test.STATE"
    )
    read = load_function(f"{tmp_path}/user_module_of_test.py:read", AgentError)
    load_function(f"{tmp_path}/shared_module_of_test.py:add", AgentError)()
    assert read() == [1]


def test_a_worker_ends_with_its_parent_even_in_the_middle_of_an_episode(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(
        "import time\ndef agent(task, ep): print('on', flush=True); time.sleep(3600)"
    )
    worker = subprocess.Popen(
        [sys.executable, "-m", "areal_agents.rollout.agents.worker", f"{tmp_path}/sleeps.py:agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None and worker.stdout is not None and worker.stderr is not None
    assert json.loads(worker.stdout.readline()) == {"ready": True}
    worker.stdin.write(json.dumps({"task": {}, "id": "e", "base_url": "u", "api_key": "k"}) + "\n")
    worker.stdin.flush()
    assert worker.stderr.readline() == "on\n"  # what an agent prints goes to standard error
    worker.stdin.close()  # as when the parent is killed
    assert worker.wait(timeout=60) == 0
    worker.stdout.close()
    worker.stderr.close()


def test_a_worker_does_not_import_heavy_packages() -> None:
    heavy = ("torch", "numpy", "httpx", "datasets", "pydantic", "sqlalchemy", "asyncio")
    code = (
        f"import sys, areal_agents.rollout.agents.worker; print([m for m in {heavy!r} if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
