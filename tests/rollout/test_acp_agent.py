"""Agents that speak the Agent Client Protocol: whole episodes of a small one, and how such agents fail.

The agent is written with the protocol's own package. Its behavior depends on the prompt.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from real_tokenizers import qwen_folder
from time_limits import TimeLimits

from areal_agents import Episode, acp_agent
from areal_agents.client import AsyncClient
from areal_agents.core.rollout import Task
from areal_agents.errors import AgentError, ConfigError
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.server import make_renderer
from areal_agents.rendering import ChatRenderer
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.attempt import Attempt, open_attempt, run_rollout
from areal_agents.rollout.agents.cli.acp import session
from areal_agents.rollout.agents.cli.acp.reply import AcpToolCall
from areal_agents.rollout.agents.cli.prepare import prompts_of_task
from areal_agents.rollout.agents.coroutine import CoroutineAgent
from areal_agents.rollout.config import LimitsConfig, RewardConfig
from areal_agents.rollout.rewarding import RewardFunction
from tests.rollout.test_cli_agent import ADMIN_KEY, program, sleepers

AGENT = """
import asyncio, json, os, pathlib, subprocess, sys, time
if sys.argv[1:] == ["--version"]:
    print("tiny 1.10.1")
    raise SystemExit
from acp import Agent, run_agent, update_agent_message_text
from acp.exceptions import RequestError
from acp.schema import InitializeResponse, NewSessionResponse, PermissionOption, PromptResponse
from acp.schema import ToolCallUpdate
from openai import AsyncOpenAI

settings = json.loads((pathlib.Path.home() / "settings.json").read_text())
OPTIONS = [
    PermissionOption(option_id=kind[:3], name=kind, kind=kind)
    for kind in ("allow_always", "allow_once", "reject_once")
]

class Tiny(Agent):
    def on_connect(self, client):
        self.client, self.messages = client, []

    async def initialize(self, protocol_version, **rest):
        return InitializeResponse(protocol_version=protocol_version)

    async def new_session(self, cwd, **rest):
        assert cwd == os.getcwd()
        return NewSessionResponse(session_id="s")

    async def prompt(self, prompt, session_id, **rest):
        text = prompt[0].text
        if text == "die":
            print("lost", settings["key"], file=sys.stderr)
            os._exit(7)
        if text == "hang":
            subprocess.Popen(["setsid", "sleep", "300"])
            pathlib.Path("hung").touch()
            await asyncio.sleep(300)
        if text == "garbage":
            print("Welcome!", flush=True)
            await asyncio.sleep(300)
        if text == "close":
            os.close(1)
            time.sleep(300)
        if text == "refuse":
            raise RequestError.internal_error({"details": "no model"})
        if text.startswith("ask"):
            call = ToolCallUpdate(tool_call_id=text, title=text, kind="edit", raw_input={"path": text})
            answer = await self.client.request_permission(
                session_id=session_id, tool_call=call, options=OPTIONS
            )
            chosen = getattr(answer.outcome, "option_id", None)
            await self.client.session_update(session_id, update_agent_message_text("[" + str(chosen) + "]"))
        self.messages.append({"role": "user", "content": text})
        async with AsyncOpenAI(base_url=settings["url"], api_key=settings["key"], max_retries=0) as model:
            reply = await model.chat.completions.create(model="policy", messages=self.messages, max_tokens=8)
        said = reply.choices[0].message
        self.messages.append(said.model_dump(exclude_none=True))
        for part in ("<", said.content or "", ">"):
            await self.client.session_update(session_id, update_agent_message_text(part))
        pathlib.Path("made.txt").write_text(text)
        return PromptResponse(stop_reason="end_turn")

asyncio.run(run_agent(Tiny()))
"""
DEFINITION = """
program = "tiny"
install = "pip install tiny"
least_version = "1.10"
dialect = "chat"

[acp]
arguments = ["{home}/agent.py"]

[files]
"settings.json" = '{"url": "{base_url}", "key": "{key}"}'
"agent.py" = '''%s'''
"""


@pytest.fixture(scope="module")
def qwen_renderer() -> ChatRenderer:
    """A renderer that keeps the reasoning; otherwise the second prompt would begin a new root."""
    return make_renderer(qwen_folder(), ProxyConfig(reasoning="keep"))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The definition of the small agent, and its program, which is this interpreter."""
    for name in ("project", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "word.txt").write_text("word")
    (tmp_path / "tiny.toml").write_text(DEFINITION % AGENT)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return {"cli": str(tmp_path / "tiny.toml"), "executable": sys.executable}


async def play(scripted: Any, agent: Any, task: dict[str, Any], reward: str = "", **limits: Any) -> Any:
    """Run one episode; return its outcome and its record."""
    loaded = load_agent(agent) if isinstance(agent, dict) else CoroutineAgent(agent)
    function = RewardFunction(RewardConfig(episode=reward)) if reward else None
    bounds = LimitsConfig(**{"time_s": 120.0, **limits})
    async with AsyncClient(scripted.url, ADMIN_KEY) as client:
        attempt = Attempt(Task("t", task), "train")
        opened = await open_attempt(client, attempt, limits=bounds)
        try:
            outcome = await run_rollout(
                client, loaded, attempt.task, opened, limits=bounds, function=function
            )
        finally:
            await loaded.close()
    return outcome, scripted.store.load_episode(opened.id)


def nothing_is_left(tmp_path: Path) -> bool:
    """Whether no folder and no process of an agent is left."""
    folders = [path for path in (tmp_path / "tmp").glob("*") if not path.name.startswith("areal-agents-sand")]
    return not folders and not sleepers(str(tmp_path / "tmp"))


def has_hung(tmp_path: Path) -> bool:
    """Whether the agent has begun to hang, in the folder in which it works."""
    return any("hung" in files for _, _, files in os.walk(tmp_path / "tmp"))


async def test_an_episode_function_prompts_an_agent_turn_by_turn(
    scripted: Any, tiny: dict[str, str], tmp_path: Path
) -> None:
    seen: list[Any] = []

    async def agent(task: dict[str, Any], ep: Episode) -> float:
        async with acp_agent(**tiny, workdir=task["folder"]) as running:
            seen.append(await running.prompt("ask first"))
            seen.append(await running.prompt("Go on."))
            folder = await running.end()
            assert sorted(os.listdir(folder)) == ["made.txt", "word.txt"]
            assert await running.end() == folder
            with pytest.raises(AgentError, match="takes no further prompt: it has been ended"):
                await running.prompt("More.")
        assert not folder.exists()
        return 1.0

    outcome, episode = await play(scripted, agent, {"folder": str(tmp_path / "project")})
    assert (outcome.status, outcome.error) == ("finished", None)
    first, second = episode.turns
    assert (first.parent, second.parent) == (None, first.id)
    assert [reply.text for reply in seen] == ["[all]<ok>", "<ok>"]
    assert [reply.stop_reason for reply in seen] == ["end_turn", "end_turn"]
    call = AcpToolCall("ask first", "ask first", "edit", "", {"path": "ask first"}, allowed=True)
    assert [reply.tool_calls for reply in seen] == [(call,), ()]
    assert os.listdir(tmp_path / "project") == ["word.txt"] and nothing_is_left(tmp_path)


@pytest.mark.parametrize("isolation", ["none", "process", "bubblewrap"])
async def test_prompts_from_the_configuration_are_sent_one_after_another(
    scripted: Any, tiny: dict[str, str], tmp_path: Path, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)  # the sandbox does not have this file of the tests
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    (tmp_path / "graded.py").write_text(
        "def score(episode):\n    return 2.0 * ((episode.workdir / 'made.txt').read_text() == 'Now ü.')\n"
    )
    agent = tiny | {"prompts": "{task.say}", "workdir": "{task.folder}", "isolation": isolation}
    task = {"say": ["ask", "Now ü."], "folder": str(tmp_path / "project")}
    outcome, episode = await play(scripted, agent, task, f"{tmp_path}/graded.py:score")
    assert (outcome.status, outcome.error) == ("finished", None)
    assert [turn.parent for turn in episode.turns] == [None, episode.turns[0].id]
    assert [reward.value for reward in episode.rewards] == [2.0]
    assert nothing_is_left(tmp_path)


async def test_permission_requests_are_answered_by_the_given_policy(
    scripted: Any, tiny: dict[str, str], tmp_path: Path
) -> None:
    async def agent(task: dict[str, Any], ep: Episode) -> float:
        async with acp_agent(**tiny, permissions=lambda call: call.input["path"] == "ask b") as running:
            answers = [(await running.prompt(text)).text[:5] for text in ("ask a", "ask b")]
            assert answers == ["[rej]", "[all]"]
        async with acp_agent(**tiny, ep=ep, permissions="reject") as running:
            assert (await running.prompt("ask")).tool_calls[0].allowed is False
        return 1.0

    outcome, _ = await play(scripted, agent, {})
    assert (outcome.status, outcome.error) == ("finished", None)


@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_an_agent_that_fails_fails_its_episode_and_leaves_nothing(
    scripted: Any, tiny: dict[str, str], tmp_path: Path, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Path(sys.executable).name
    faults = {
        "die": f"{name} exited with status 7: lost ***",
        "hang": f"{name} did not end its turn within 60 s",
        "garbage": f"{name} sent a line that is not a message of the Agent Client Protocol ('Welcome!')",
        "refuse": f'{name} answered session/prompt with an error: Internal error {{"details": "no model"}}',
    }
    for prompt, error in faults.items():
        agent = tiny | {"prompts": ["Begin.", prompt], "turn_timeout_s": 60, "isolation": isolation}
        with monkeypatch.context() as patched:
            if prompt == "hang":
                TimeLimits(patched, lambda: has_hung(tmp_path), module=session)
            outcome, episode = await play(scripted, agent, {})
        assert (outcome.status, outcome.error, len(episode.turns)) == ("failed", error, 1)
    assert nothing_is_left(tmp_path)


async def test_an_agent_that_closes_its_output_or_begins_no_session_fails(
    scripted: Any, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_agents.rollout.agents.cli.acp.connection.EXIT_S", 0.5)
    outcome, _ = await play(scripted, tiny | {"prompts": ["close"]}, {})
    assert outcome.error is not None and "closed its standard output" in outcome.error
    monkeypatch.setattr("areal_agents.rollout.agents.cli.acp.session.START_S", 1.0)
    program(tmp_path, "silent", 'test "$1" = --version && echo 1.10 || exec sleep 300')
    outcome, _ = await play(scripted, tiny | {"prompts": ["x"], "executable": f"{tmp_path}/silent"}, {})
    assert outcome.error == "silent began no session within 1 s"
    assert nothing_is_left(tmp_path)


async def test_an_episode_that_reaches_its_time_limit_is_graded_with_the_files_so_far(
    scripted: Any, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TimeLimits(monkeypatch, lambda: has_hung(tmp_path))
    (tmp_path / "graded.py").write_text(
        "def score(episode):\n    return (episode.workdir / 'hung').exists()\n"
    )
    agent = tiny | {"prompts": ["Begin.", "hang"]}
    reward = f"{tmp_path}/graded.py:score"
    outcome, episode = await play(scripted, agent, {}, reward)
    assert (outcome.status, outcome.error, len(episode.turns)) == ("truncated", None, 1)
    assert [reward.value for reward in episode.rewards] == [1.0]
    assert nothing_is_left(tmp_path)


async def test_agents_that_cannot_be_prompted_turn_by_turn_are_refused(
    tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = {"prompts": ["a", "b"]}
    path = program(tmp_path, "codex", "echo codex 99.0")["PATH"]
    monkeypatch.setenv("PATH", path)
    for agent, fault in (
        (
            {"cli": "codex", **several},
            r"the definition of codex has no \[acp\]: it takes one prompt, not several",
        ),
        (tiny, "speaks only the Agent Client Protocol; give it prompts"),
        (tiny | several | {"prompt": "c"}, "give prompt or prompts, not both"),
        (tiny | {"permissions": "reject"}, "permissions has no effect without prompts"),
        (tiny | several | {"max_turns": 3}, "has no option for it; set rollout.limits.max_turns"),
        (tiny | several | {"permissions": "ask"}, "permissions: Input should be 'allow' or 'reject'"),
    ):
        with pytest.raises(AgentError, match=fault):
            load_agent(agent)
    with pytest.raises(AgentError, match="no episode runs here; pass the episode"):
        async with acp_agent(**tiny):
            pass
    with pytest.raises(AgentError, match="must be a list of strings in the task, got 3"):
        prompts_of_task("{task.n}", {"n": 3})
    monkeypatch.setitem(sys.modules, "acp", None)
    with pytest.raises(ConfigError, match=r"needs acp, .*: pip install 'areal-agents\[acp\]'"):
        load_agent(tiny | several)
