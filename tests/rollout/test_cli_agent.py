"""Command-line agents: the shipped definitions, how they are launched, and whole episodes of a small one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import Task
from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.agent import load_agent
from areal_agents.rollout.agents.attempt import Attempt, open_attempt, run_rollout
from areal_agents.rollout.agents.cli.definition import known_definitions, load_definition
from areal_agents.rollout.agents.cli.prepare import Launch, folder_of_task, of_task, prepare
from areal_agents.rollout.agents.cli.program import find_program, find_program_in_image
from areal_agents.rollout.config import LimitsConfig, RewardConfig
from areal_agents.rollout.rewarding import RewardFunction
from areal_agents.sandbox.remote.hosts import SandboxHosts
from tests.sandbox.conftest import IMAGE, sandbox_host
from tests.sandbox.conftest import needs as needs_isolation

ADMIN_KEY = "admin-key-of-the-tests"
EPISODE = Episode("e", "http://10.0.0.1:8000/e/ep-1/v1", "ep-1")
URL, ROOT, HOME = EPISODE.base_url, "http://10.0.0.1:8000/e/ep-1", Path("/h")


def launch_of(name: str, *, max_turns: int | None = None, inherited: Mapping[str, str] = {}) -> Launch:
    return prepare(
        load_definition(name),
        EPISODE,
        prompt="-x {key}",
        model="policy",
        context=40_000,
        max_turns=max_turns,
        home=HOME,
        workdir=Path("/w"),
        inherited=inherited,
    )


# For each definition: its arguments, with a turn limit if it has one; its standard input; its variables.
LAUNCHES: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "claude-code": (
        ["--max-turns", "7", "--print", "--dangerously-skip-permissions", "--model", "policy"],
        "-x {key}",
        {
            "ANTHROPIC_API_KEY": "ep-1",
            "ANTHROPIC_BASE_URL": ROOT,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "policy",
            "ANTHROPIC_SMALL_FAST_MODEL": "policy",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "40000",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_SUBAGENT_MODEL": "policy",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        },
    ),
    "codex": (
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"],
        "-x {key}",
        {"AREAL_AGENTS_KEY": "ep-1", "CODEX_HOME": "/h/.codex"},
    ),
    "gemini-cli": (
        ["--yolo", "--model", "policy"],
        "-x {key}",
        {"GEMINI_API_KEY": "ep-1", "GEMINI_CLI_TRUST_WORKSPACE": "true", "GOOGLE_GEMINI_BASE_URL": ROOT},
    ),
    "mini-swe-agent": (
        ["--config", "mini.yaml", "--config", "agent.step_limit=7", "--model", "openai/policy", "--yolo"]
        + ["--exit-immediately", "--cost-limit", "0", "--task=-x {key}"],
        "",
        {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "OPENAI_API_BASE": URL,
            "OPENAI_API_KEY": "ep-1",
            "OPENAI_BASE_URL": URL,
        },
    ),
    "mistral-vibe": (
        ["--max-turns", "7", "--auto-approve", "--trust", "--prompt=-x {key}"],
        "",
        {"AREAL_AGENTS_KEY": "ep-1", "VIBE_HOME": "/h/.vibe"},
    ),
    "opencode": (
        ["run", "--auto", "--title", "episode", "--model", "areal-agents/policy"],
        "-x {key}",
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
    ),
    "openhands": (
        ["-X", "max_turns=7", "/h/episode.py"],
        "-x {key}",
        {
            "DO_NOT_TRACK": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LLM_API_KEY": "ep-1",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        },
    ),
    "pi": (
        ["--print", "--no-session", "--offline", "--provider", "areal-agents", "--model", "policy"],
        "-x {key}",
        {"PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
    ),
    "qwen-code": (
        ["--max-session-turns", "7", "--yolo", "--auth-type", "openai", "--model", "policy"],
        "-x {key}",
        {
            "OPENAI_API_KEY": "ep-1",
            "OPENAI_BASE_URL": URL,
            "OPENAI_MODEL": "policy",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        },
    ),
}
FOLDERS = {
    "HOME": "/h",
    "TMPDIR": "/h/tmp",
    "XDG_CACHE_HOME": "/h/.cache",
    "XDG_CONFIG_HOME": "/h/.config",
    "XDG_DATA_HOME": "/h/.local/share",
    "XDG_STATE_HOME": "/h/.local/state",
}


def test_the_shipped_definitions_are_known() -> None:
    assert known_definitions() == sorted(LAUNCHES)


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_launch_of_each_shipped_definition(name: str) -> None:
    arguments, stdin, variables = LAUNCHES[name]
    limit = 7 if load_definition(name).turn_limit else None
    launch = launch_of(
        name, max_turns=limit, inherited={"PATH": "/bin", "OPENAI_API_KEY": "sk", "HOME": "/u"}
    )
    assert list(launch.arguments) == arguments
    assert launch.stdin == stdin
    not_proxied = {"NO_PROXY": "10.0.0.1", "no_proxy": "10.0.0.1"}
    assert launch.environment == {"PATH": "/bin", **FOLDERS, **not_proxied, **variables}


def test_the_configuration_files_of_the_definitions_have_the_episode_and_the_model() -> None:
    def parsed(name: str, file: str) -> Any:
        text = launch_of(name).files[file]
        return tomllib.loads(text) if file.endswith(".toml") else json.loads(text)

    codex = parsed("codex", ".codex/config.toml")
    assert (codex["model"], codex["model_context_window"]) == ("policy", 40_000)
    provider = codex["model_providers"][codex["model_provider"]]
    assert (provider["base_url"], provider["env_key"]) == (URL, "AREAL_AGENTS_KEY")

    opencode = parsed("opencode", ".config/opencode/opencode.json")
    provider = opencode["provider"]["areal-agents"]
    assert provider["options"] == {"baseURL": URL, "apiKey": "ep-1"}
    assert provider["models"]["policy"]["limit"]["context"] == 40_000

    pi = parsed("pi", ".pi/agent/models.json")["providers"]["areal-agents"]
    assert (pi["baseUrl"], pi["apiKey"], pi["models"][0]["contextWindow"]) == (URL, "ep-1", 40_000)

    vibe = parsed("mistral-vibe", ".vibe/config.toml")
    assert vibe["providers"][0]["api_base"] == URL
    assert vibe["models"][0]["max_context_length"] == 40_000

    for name, file in (("gemini-cli", ".gemini/settings.json"), ("qwen-code", ".qwen/settings.json")):
        assert parsed(name, file)["privacy"]["usageStatisticsEnabled"] is False
    compile(launch_of("openhands").files["episode.py"], "episode.py", "exec")


DEFINITION = """
program = "tiny"
install = "pip install tiny"
least_version = "1.10"
dialect = "chat"
arguments = ["run"]
stdin = "{prompt}"
"""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (DEFINITION + "colour = 1", r"tiny.toml is not valid: colour: Extra inputs are not permitted"),
        (DEFINITION.replace("chat", "smoke"), "dialect: Input should be 'chat'"),
        (DEFINITION.replace("1.10", "new"), "least_version: String should match"),
        (DEFINITION.replace("{prompt}", ""), r"\{prompt\} must be in arguments or in stdin, once"),
        (
            DEFINITION.replace("run", "{promt}"),
            r"arguments: there is no placeholder \{promt\}; known: anthropic",
        ),
        (DEFINITION + '[files]\n"../x" = ""', r"files: must be paths within the home folder, got '../x'"),
        (
            DEFINITION + '[environment]\nN = "{max_turns}"',
            r"environment.N: \{max_turns\} belongs into turn_limit",
        ),
        ("program = ", "tiny.toml cannot be read: Invalid value"),
    ],
)
def test_a_definition_that_cannot_work_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "tiny.toml").write_text(text)
    with pytest.raises(AgentError, match=fault):
        load_definition(str(tmp_path / "tiny.toml"))


def test_an_unknown_definition_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(AgentError, match="no command-line agent 'codecs'; known: claude-code, codex, "):
        load_definition("codecs")


def program(folder: Path, name: str, prints: str) -> dict[str, str]:
    """Write a program with this shell code; return an environment whose PATH has it."""
    (folder / name).write_text(f"#!/bin/sh\n{prints}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_a_program_is_found_and_its_version_is_checked(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(DEFINITION)
    definition = load_definition(str(tmp_path / "tiny.toml"))
    with pytest.raises(AgentError, match="no program 'tiny' on the PATH; install it with 'pip install tiny'"):
        find_program(definition, "", {"PATH": "/usr/bin:/bin"})
    with pytest.raises(AgentError, match="no program '/none/tiny'; install it"):
        find_program(definition, "/none/tiny", {"PATH": "/usr/bin:/bin"})
    for prints, fault in (
        ("echo tiny 1.9.3", "has version 1.9.3, and its definition requires 1.10 or newer; install it with"),
        ("echo broken; exit 3", r"printed no version \(exit status 3\): broken; install it with"),
    ):
        with pytest.raises(AgentError, match=fault):
            find_program(definition, "", program(tmp_path, "tiny", prints))
    inherited = program(tmp_path, "tiny", "echo tiny v1.10.0 >&2")
    assert find_program(definition, "", inherited) == tmp_path / "tiny"


def test_a_program_is_found_in_a_docker_image(tmp_path: Path) -> None:
    """It needs docker; see `make test-docker`."""
    needs_isolation("docker")
    (tmp_path / "tiny.toml").write_text(DEFINITION)
    definition = load_definition(str(tmp_path / "tiny.toml"))
    assert find_program_in_image(definition, "python3", IMAGE).name == "python3"
    with pytest.raises(AgentError, match="the image has no program tiny; install it with 'pip install tiny'"):
        find_program_in_image(definition, "", IMAGE)
    with pytest.raises(AgentError, match="sh in the image .* printed no version|has version none"):
        find_program_in_image(definition, "sh", IMAGE)
    with pytest.raises(AgentError, match="No such image: areal-agents/none|Unable to find image"):
        find_program_in_image(definition, "python3", "areal-agents/none:none")


def test_an_agent_without_its_program_or_with_wrong_settings_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(AgentError, match="no program 'codex' on the PATH; install it with 'npm install"):
        load_agent({"cli": "codex"})
    with pytest.raises(AgentError, match="codex has no option for it; set rollout.limits.max_turns"):
        load_agent({"cli": "codex", "max_turns": 3})
    with pytest.raises(AgentError, match="agent: colour: Extra inputs"):
        load_agent({"cli": "codex", "colour": "x"})
    with pytest.raises(AgentError, match="agent: readable: /none does not exist"):
        load_agent({"cli": "codex", "isolation": "bubblewrap", "readable": ["/none"]})
    with pytest.raises(AgentError, match="isolation: docker needs image, the name of an image"):
        load_agent({"cli": "codex", "isolation": "docker"})
    with pytest.raises(AgentError, match="isolation: docker needs the program docker; install Docker"):
        load_agent({"cli": "codex", "isolation": "docker", "image": "python:3.11-slim"})


def test_a_prompt_is_filled_in_from_the_fields_of_the_task(tmp_path: Path) -> None:
    task = {"instruction": "Do {task.x}", "n": 2, "deep": {"list": ["ü"]}, "folder": str(tmp_path)}
    assert of_task("{task.instruction} {n} {task.n}", task, "prompt") == "Do {task.x} {n} 2"
    assert of_task("{task.deep.list}", task, "prompt") == '["ü"]'
    assert json.loads(of_task("{task}", task, "prompt")) == task
    with pytest.raises(AgentError, match=r"agent.prompt: the task has no \{task.deep.text\}; there is list"):
        of_task("{task.deep.text}", task, "prompt")
    assert folder_of_task("/base/{task.folder}", task) == tmp_path
    with pytest.raises(AgentError, match="agent.workdir: there is no folder /base/2"):
        folder_of_task("/base/{task.n}", task)


TINY = '''
"""An agent in the manner of those of the command line: it asks, writes a file, and asks again."""
import json, os, pathlib, subprocess, sys
from openai import OpenAI

if sys.argv[1:] == ["--version"]:
    print("tiny 1.10.1")
    raise SystemExit
home = pathlib.Path(os.environ["HOME"])
settings = json.loads((home / "settings.json").read_text())
prompt = sys.stdin.read()
client = OpenAI(base_url=settings["url"], api_key=settings["key"], max_retries=0)
messages = [{"role": "user", "content": prompt}]
for _ in range(2):
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "Go on."})
seen = {
    "home": str(home), "cwd": os.getcwd(), "files": sorted(os.listdir()), "prompt": prompt,
    "leaked": [name for name in os.environ if name in ("OPENAI_API_KEY", "SECRET")],
}
pathlib.Path("made.txt").write_text("made")
subprocess.Popen(["setsid", "sleep", "300"])
pathlib.Path(sys.argv[1]).write_text(json.dumps(seen))
print({"53": "out of turns", "54": f"gave up with {settings['key']}"}.get(sys.argv[2], ""))
raise SystemExit(int(sys.argv[2]))
'''


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of an agent with a definition of the user; the agent records what it sees in seen.json."""
    (tmp_path / "agent.py").write_text(textwrap.dedent(TINY))
    for name in ("project", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "word.txt").write_text("word")
    program(tmp_path, "tiny", f'exec {sys.executable} {tmp_path / "agent.py"} "$@"')
    definition = DEFINITION.replace('["run"]', f'["{tmp_path / "seen.json"}", "0"]')
    files = '[files]\n"settings.json" = \'{"url": "{base_url}", "key": "{key}"}\'\n'
    limit = f'[turn_limit]\narguments = ["{tmp_path / "seen.json"}", "{{max_turns}}"]\n'
    limit += 'statuses = [53, 54]\nsays = "out of turns"\n'
    (tmp_path / "tiny.toml").write_text(definition + files + limit)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-host")
    monkeypatch.setenv("SECRET", "s")
    return {
        "cli": str(tmp_path / "tiny.toml"),
        "executable": str(tmp_path / "tiny"),
        "workdir": "{task.folder}",
    }


async def play(
    served: Any,
    agent: dict[str, Any],
    task: dict[str, Any],
    reward: str = "",
    hosts: SandboxHosts | None = None,
    **limits: Any,
) -> tuple[Any, Any]:
    """Run one episode; return its outcome and its record."""
    function = RewardFunction(RewardConfig(episode=reward)) if reward else None
    loaded = load_agent(agent, hosts=hosts)
    bounds = LimitsConfig(**{"time_s": 60.0, **limits})
    async with AsyncClient(served.url, ADMIN_KEY) as client:
        attempt = Attempt(Task("t", task), "train")
        opened = await open_attempt(client, attempt, limits=bounds)
        try:
            outcome = await run_rollout(
                client, loaded, attempt.task, opened, limits=bounds, function=function
            )
        finally:
            await loaded.close()
    return outcome, served.store.load_episode(opened.id)


def sleepers(mark: str) -> list[str]:
    """The command lines of the processes, other than zombies, whose environment contains a string."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


async def test_an_episode_of_a_command_line_agent_leaves_no_files_and_no_processes(
    served: Any, tiny: dict[str, Any], tmp_path: Path
) -> None:
    task = {"instruction": "Say ü.", "folder": str(tmp_path / "project")}
    outcome, episode = await play(served, tiny, task)
    assert (outcome.status, outcome.error) == ("finished", None)
    assert len(episode.turns) == 2
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["prompt"], seen["files"], seen["leaked"]) == ("Say ü.", ["word.txt"], [])
    assert Path(seen["home"]).parent == Path(seen["cwd"]).parent
    assert os.listdir(tmp_path / "project") == ["word.txt"]
    assert os.listdir(tmp_path / "tmp") == []
    assert sleepers(seen["home"]) == []


async def test_a_reward_function_sees_the_files_that_the_agent_left(
    served: Any, tiny: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "graded.py").write_text(
        "def score(episode):\n"
        "    names = sorted(path.name for path in episode.workdir.iterdir())\n"
        "    assert names in (['made.txt', 'word.txt'], ['word.txt']), names\n"
        "    return len(names) + 10.0 * (episode.status == 'truncated')\n"
    )
    task = {"instruction": "Go.", "folder": str(tmp_path / "project")}
    for limits, status, score in (({}, "finished", 2.0), ({"max_turns": 1}, "truncated", 11.0)):
        outcome, episode = await play(served, tiny, task, f"{tmp_path}/graded.py:score", **limits)
        assert (outcome.status, outcome.error) == (status, None)
        assert [reward.value for reward in episode.rewards] == [score]
    assert os.listdir(tmp_path / "tmp") == []


_SCRIPT_IN_HOME = '["{home}/agent.py", "seen", "0"]'


@pytest.mark.parametrize("where", ["process", "bubblewrap", "process on a host"])
async def test_a_command_line_agent_plays_its_episode_in_a_sandbox(
    served: Any, tiny: dict[str, Any], tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)  # the sandbox does not have this file of the tests
    isolation, _, host = where.partition(" ")
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    (tmp_path / "graded.py").write_text(
        "def score(episode):\n    return 2.0 * ((episode.workdir / 'made.txt').read_text() == 'made')\n"
    )
    # The program is this interpreter, which a sandbox has, and the script is in the home folder.
    definition = (
        (tmp_path / "tiny.toml").read_text().replace(f'["{tmp_path}/seen.json", "0"]', _SCRIPT_IN_HOME)
    )
    (tmp_path / "tiny.toml").write_text(definition.replace("[files]", f"[files]\n'agent.py' = '''{TINY}'''"))
    task = {"instruction": "Say ü.", "folder": str(tmp_path / "project")}
    agent = tiny | {"isolation": isolation, "executable": sys.executable}
    async with AsyncExitStack() as stack:
        hosts = None
        if host:
            address = await stack.enter_async_context(sandbox_host())
            hosts = SandboxHosts(lambda: [address])
        outcome, episode = await play(served, agent, task, f"{tmp_path}/graded.py:score", hosts)
    assert (outcome.status, outcome.error, len(episode.turns)) == ("finished", None, 2)
    assert [reward.value for reward in episode.rewards] == [2.0]
    assert os.listdir(tmp_path / "project") == ["word.txt"]
    assert [str(path) for path in (tmp_path / "tmp").glob("*/*")] == []


async def test_the_exit_status_of_a_command_line_agent_decides_how_its_episode_ends(
    served: Any, tiny: dict[str, Any], tmp_path: Path
) -> None:
    task = {"instruction": "Go.", "folder": str(tmp_path / "project")}
    outcome, _ = await play(served, tiny | {"max_turns": 53}, task)
    assert (outcome.status, outcome.error) == ("finished", None)
    outcome, _ = await play(served, tiny | {"max_turns": 54}, task)
    assert outcome.error == "tiny exited with status 54: gave up with ***"
    outcome, episode = await play(served, tiny, task, max_turns=1)
    assert (outcome.status, len(episode.turns)) == ("truncated", 1)
    outcome, _ = await play(served, tiny | {"prompt": "{task.question}"}, task)
    assert outcome.error == "agent.prompt: the task has no {task.question}; there is folder, instruction"
    assert os.listdir(tmp_path / "tmp") == []


async def test_an_episode_that_fails_before_its_program_starts_frees_its_place(
    served: Any, tiny: dict[str, Any]
) -> None:
    task, limits = Task("t", {"instruction": "Go."}), LimitsConfig()
    async with sandbox_host(places=1) as address, AsyncClient(served.url, ADMIN_KEY) as client:
        agent = load_agent(
            tiny | {"workdir": "", "prompt": "{task.question}", "isolation": "process"},
            hosts=SandboxHosts(lambda: [address], place_s=10),
        )
        for _ in range(2):
            opened = await open_attempt(client, Attempt(task, "train"), limits=limits)
            outcome = await run_rollout(client, agent, task, opened, limits=limits)
            assert outcome.error == "agent.prompt: the task has no {task.question}; there is instruction"
        await agent.close()


async def test_a_cancelled_episode_leaves_no_files(tiny: dict[str, Any], tmp_path: Path) -> None:
    agent = load_agent(tiny | {"workdir": ""})
    (tmp_path / "agent.py").write_text(
        "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch(); time.sleep(300)"
    )
    running = asyncio.create_task(agent.run({"instruction": "x"}, EPISODE))
    async with asyncio.timeout(60):
        while not (tmp_path / "seen.json").exists():
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await agent.close()
    assert os.listdir(tmp_path / "tmp") == []


async def test_a_cancelled_episode_in_a_sandbox_is_not_an_error_of_its_agent(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    """This holds even if the files that it left are too large to be copied."""
    agent = load_agent(tiny | {"workdir": "", "isolation": "process"})
    script = (
        "import os, pathlib, sys, time\nos.truncate(os.open('large', os.O_CREAT | os.O_WRONLY), 65 << 20)\n"
    )
    (tmp_path / "agent.py").write_text(script + "pathlib.Path(sys.argv[1]).touch(); time.sleep(300)")
    running = asyncio.create_task(agent.run({"instruction": "x"}, EPISODE))
    async with asyncio.timeout(60):
        while not (tmp_path / "seen.json").exists():
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await agent.close()
    assert [str(path) for path in (tmp_path / "tmp").glob("*/*")] == []
