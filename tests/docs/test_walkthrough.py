"""The commands and snippets of the pages run as written, in an empty folder.

Only values that a reader replaces are replaced: ids, ports, hosts and paths of models. Training runs are cut
to a few steps, and simulations to small batches.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from docs_support import bash, block, blocks, environment
from openai import OpenAI

import areal_agents.quickstart
from areal_agents.inference.ports import reserved_ports
from areal_agents.rewards import FinishedEpisode
from areal_agents.rollout.config import DataConfig
from areal_agents.rollout.data import load_tasks

START_S = 120.0
END_S = 60.0
SMALL = (
    " trainer.steps=1 trainer.warmup_steps=0 rollout.groups=2 rollout.group_size=2 eval.episodes=2"
    " rollout.limits.max_completion_tokens=8"
)
MESSAGES = [{"role": "user", "content": "Which symbol stands for Neon?"}]
TASKS = [
    {"question": f"Which symbol stands for {name}?", "answer": "N"}
    for name in ("Neon", "Tin", "Iron", "Zinc")
]

# The blocks that are run, by page and by the beginning of a line; each has a test in this module.
RUN = {
    ("README.md", "areal-agents init my_agent"),
    ("README.md", "areal-agents serve --model path/to/model --port 8000"),
    ("README.md", "client = OpenAI("),
    ("README.md", "client = Anthropic("),
    ("README.md", "curl -s localhost:8000/rewards"),
    ("README.md", "printf "),
    ("README.md", "ID=episode-…"),
    ("README.md", "from areal_agents import Episode, episode"),
    ("docs/agents.md", "from areal_agents import Episode, episode"),
    ("docs/agents.md", "Episode.from_environment()"),
    ("docs/agents.md", "curl -s "),
    ("docs/agents.md", "areal-agents doctor"),
    ("docs/data.md", "# tasks.py"),
    ("docs/sandboxes.md", "from pathlib import Path"),
    ("docs/deploying.md", "areal-agents serve --model runs/my_agent-seed0/final --engine-url"),
    ("docs/deploying.md", "areal-agents export"),
    ("docs/evaluating.md", "areal-agents eval config.yaml eval.data.path=other.jsonl"),
    ("docs/evaluating.md", "areal-agents episodes show"),
    ("docs/inspecting.md", "areal-agents tail"),
    ("docs/protocol.md", "ID=episode-…"),
    ("docs/python.md", "import areal_agents as aa"),
    ("docs/python.md", "result = aa.evaluate"),
    ("docs/rewards.md", "def score"),
    ("docs/rewards.md", "def form"),
    ("docs/rewards.md", "score = judge("),
    ("docs/rewards.md", "rank = group_judge("),
    ("docs/serve-and-train.md", "client = OpenAI("),
    ("docs/serve-and-train.md", "curl -s localhost:8000/rewards"),
    ("docs/simulator.md", "areal-agents simulate --from runs/search_agent-seed0"),
    ("docs/training.md", "areal-agents train config.yaml data.episodes"),
    ("integrations/README.md", "curl -s -X POST localhost:8000/episodes"),
}

# The blocks that are not run here, and the reasons. tests/examples runs the recipes, whose pages are not
# listed.
NOT_RUN = {
    ("README.md", "pip install"): "tests/starter builds the wheel; CI installs from a checkout",
    ("README.md", "make demo"): "tests/examples runs the same configuration; CI runs make test",
    ("README.md", "const client"): "tests/integrations/test_node_client.py",
    ("CONTRIBUTING.md", "make setup"): "CI",
    (
        "docs/algorithms.md",
        "from areal_agents.algorithms.losses.tapered",
    ): "a change of a file of this package",
    ("docs/agents.md", "# user.py"): "tests/rollout/test_acp_agent.py, with a small agent",
    ("docs/algorithms.md", '"""A policy gradient'): "tests/algorithms adds the loss of this page",
    (
        "docs/algorithms.md",
        '@pytest.mark.parametrize("seed", SEEDS)',
    ): "tests/algorithms adds the loss of this page",
    ("docs/async.md", "areal-agents train"): "tests/launch",
    ("docs/async.md", "python -m benchmarks listeners"): "tests/benchmarks/test_bench_store.py",
    ("docs/view.md", "areal-agents view runs/"): "tests/view",
    (
        "docs/benchmarks.md",
        "areal-agents train examples/search_agent/config.yaml --fresh --ablate-tool",
    ): "minutes",
    (
        "docs/benchmarks.md",
        "areal-agents train examples/games/config",
    ): "minutes; tests/examples/test_games.py",
    ("docs/benchmarks.md", "python -m benchmarks engine"): "minutes; tests/benchmarks",
    ("docs/benchmarks.md", "python -m benchmarks retrieval"): "tests/benchmarks/test_bench_retrieval.py",
    ("docs/benchmarks.md", "python -m benchmarks rewards"): "tests/benchmarks/test_bench_rewards.py",
    ("docs/benchmarks.md", "python -m pytest tests/examples"): "it is a part of `make test`",
    (
        "docs/benchmarks.md",
        "python -m benchmarks weights",
    ): "tests/benchmarks/test_bench_object_storage.py",
    ("docs/benchmarks.md", "python -m benchmarks sandbox"): "tests/benchmarks/test_bench_sandbox.py",
    ("docs/benchmarks.md", "make litellm"): "minutes; tests/benchmarks",
    ("docs/benchmarks.md", "make test-gpu"): "tests/benchmarks/test_bench_gpu.py",
    ("docs/benchmarks.md", "python -m benchmarks proxy --saturate"): "minutes; tests/benchmarks",
    ("docs/benchmarks.md", "python -m benchmarks store --url"): "tests/benchmarks/test_bench_store.py",
    ("docs/benchmarks.md", "python -m benchmarks trainer"): "minutes; tests/benchmarks",
    ("docs/benchmarks.md", "python -m benchmarks versus"): "minutes; tests/benchmarks",
    ("docs/benchmarks.md", "python -m benchmarks async --json"): "minutes; tests/benchmarks",
    ("docs/benchmarks.md", "python -m benchmarks async --table"): "hours",
    (
        "docs/benchmarks.md",
        "areal-agents train examples/search_agent/config.yaml --fresh engine.kind",
    ): "test-sglang",
    ("docs/clusters.md", "areal-agents train cluster.yaml --launcher local"): "tests/cluster",
    ("docs/clusters.md", "areal-agents train cluster.yaml --launcher external"): "tests/cluster",
    ("docs/clusters.md", "areal-agents train cluster.yaml --launcher slurm"): "tests/cluster",
    ("docs/recipes.md", "python -m benchmarks recipes"): "tests/benchmarks",
    ("docs/configuration.md", "areal-agents train"): "an example of overriding; tests/test_config.py",
    ("docs/credit.md", "reply = await"): "tests/algorithms and tests/sdk",
    ("docs/deploying.md", "python -m sglang.launch_server"): "needs a GPU",
    (
        "docs/deploying.md",
        "areal-agents serve --model runs/my_agent-seed0/final  ",
    ): "as in serve-and-train.md",
    ("docs/deploying.md", "hf upload"): "needs an account",
    ("docs/engines.md", "areal-agents serve"): "tests/inference starts several engines",
    ("docs/evaluating.md", "areal-agents train config.yaml --ablate-tool"): "tests/launch",
    (
        "docs/evaluating.md",
        "areal-agents eval config.yaml --model runs/my_agent-seed0@final -k 8",
    ): "tests/evaluation",
    ("docs/evaluating.md", "areal-agents eval compare"): "tests/evaluation",
    ("docs/inspecting.md", "areal-agents replay"): "tests/inspection/test_replayed_episodes.py",
    ("docs/inspecting.md", "areal-agents fork"): "tests/inspection/test_forks.py",
    ("docs/inspecting.md", "async def agent"): "tests/inspection/test_forks.py",
    (
        "docs/inspecting.md",
        "messages = [{",
    ): "a part of an agent; tests/inspection/test_forks.py has a whole one",
    ("docs/evaluating.md", "areal-agents eval config.yaml --endpoint"): "tests/evaluation/test_endpoint.py",
    ("docs/evaluating.md", "areal-agents rescore"): "tests/evaluation",
    ("docs/evaluating.md", "areal-agents reference reference.json"): "tests/evaluation/test_reference.py",
    ("docs/gpus.md", "areal-agents plan config.yaml  "): "tests/launch/test_plan.py",
    ("docs/gpus.md", "areal-agents train config.yaml profile=80gb"): "needs a GPU; tests/test_profiles.py",
    ("docs/gpus.md", "areal-agents train config.yaml profile=node"): "needs GPUs; tests/test_profiles.py",
    ("docs/gpus.md", "areal-agents train config.yaml trainer.ranks=16"): "tests/launch",
    ("docs/security.md", "areal-agents serve"): "tests/attack starts such a server",
    ("docs/security.md", "openssl req -x509"): "tests/tls_files.py runs it",
    ("docs/serve-and-train.md", "areal-agents serve --model path/to/model"): "as in the README",
    ("docs/serve-and-train.md", "areal-agents train config.yaml"): "as in the README",
    ("docs/serve-and-train.md", "areal-agents serve --model runs"): "as in the README",
    ("docs/inspecting.md", "areal-agents rerun"): "tests/rerun",
    ("docs/inspecting.md", "pip install 'areal-agents[otel]'"): "tests/telemetry/test_spans.py",
    ("docs/inspecting.md", "areal-agents why"): "tests/inspection/test_why.py",
    ("docs/inspecting.md", "areal-agents episodes import chats.jsonl"): "tests/inspection/test_importing.py",
    (
        "docs/inspecting.md",
        "areal-agents episodes export runs/my_agent-seed0 good.jsonl --format",
    ): "tests/inspection/test_importing.py",
    (
        "docs/training.md",
        "areal-agents episodes import demonstrations.jsonl",
    ): "tests/inspection/test_importing.py",
    (
        "docs/training.md",
        "areal-agents collect config.yaml --endpoint",
    ): "needs another server; tests/examples/test_distill.py",
    (
        "docs/training.md",
        "areal-agents collect config.yaml --tasks",
    ): "tests/evaluation/test_evaluation.py",
    ("docs/first-hour.md", "areal-agents init my_agent"): "as in the README",
    ("docs/first-hour.md", "areal-agents view runs/"): "tests/view",
    ("docs/first-hour.md", "areal-agents doctor --config config.yaml"): "tests/doctor",
    ("docs/first-hour.md", "areal-agents doctor --rewards"): "tests/doctor",
    ("docs/first-hour.md", "areal-agents eval config.yaml"): "tests/evaluation",
    ("docs/first-hour.md", "areal-agents train config.yaml name=mine"): "as in the README",
    ("docs/settings.md", "areal-agents train"): "as in the README, with more steps",
    ("docs/settings.md", "areal-agents simulate"): "as in simulator.md",
    ("docs/scaling.md", "areal-agents simulate --scaling"): "tests/simulate/test_scaling.py",
    ("docs/sglang.md", "python3 -m venv"): "make sglang, in CI",
    ("docs/vllm.md", "python3 -m venv"): "make vllm",
    ("docs/vllm.md", "vllm/bin/python areal_agents"): "make test-vllm",
    ("docs/rewards.md", "@episode"): "a part of an agent",
    ("docs/benchmarks.md", "make demo-cli"): "minutes; tests/examples/test_repair_agent.py",
    ("docs/benchmarks.md", "examples/distill/run.sh"): "minutes; tests/examples/test_distill.py",
    ("docs/benchmarks.md", "areal-agents train examples/multi_turn_math"): "tests/examples",
    ("docs/benchmarks.md", "areal-agents train examples/tool_math"): "minutes; tests/examples",
    ("docs/benchmarks.md", "areal-agents train examples/code"): "minutes; tests/examples",
    ("docs/benchmarks.md", "areal-agents train examples/conversation"): "minutes; tests/examples",
    ("docs/benchmarks.md", "python examples/repair_tasks/transfer.py"): "minutes; tests/examples",
    ("docs/serve-and-train.md", "areal-agents online delete"): "tests/store/test_deletion.py",
    ("docs/recipes.md", "areal-agents train examples/multi_turn_math"): "tests/examples",
    ("docs/serve-and-train.md", "areal-agents train online.yaml"): "tests/training/test_canary_training.py",
    ("docs/serve-and-train.md", "areal-agents online status"): "tests/training/test_canary_training.py",
    ("docs/training.md", "areal-agents export"): "as in deploying.md",
    (
        "docs/training.md",
        "areal-agents train config.yaml trainer.ranks=16 trainer.nodes=2 trainer.node_rank",
    ): "tests/launch",
    (
        "docs/training.md",
        "areal-agents train config.yaml trainer.ranks=16 trainer.nodes=2 trainer.start",
    ): "tests/launch",
    ("docs/training.md", "srun --nodes=2 --ntasks-per-node=1"): "needs Slurm; tests/launch has its variables",
    ("integrations/README.md", "make integrations ONLY=FRAMEWORK"): "minutes; tests/integrations",
    ("integrations/README.md", "Case("): "a part of integrations/cases.py",
}


def test_every_block_that_can_be_run_is_run_or_has_a_reason() -> None:
    named = {block(page, beginning) for page, beginning in RUN | NOT_RUN.keys()}
    runnable = {b for b in blocks("bash", "python", "js") if not b.id.startswith("examples/")}
    assert not {b.id for b in runnable - named}, "add a test to this module, or a reason to NOT_RUN"
    source = "".join(Path(__file__).read_text().split())
    for page, beginning in RUN:
        named_in_a_test = f'text("{page}",{json.dumps(beginning, ensure_ascii=False)}'
        assert source.count("".join(named_in_a_test.split())) == 1, (page, beginning)


def text(page: str, beginning: str, *replaced: tuple[str, str]) -> str:
    """The text of a block with replacements; each replaced string must occur in it."""
    found = block(page, beginning).text
    for old, new in replaced:
        assert old in found, f"{old!r} is not in the block of {page}"
        found = found.replace(old, new)
    return found


@contextmanager
def started(command: str, folder: Path, url: str) -> Iterator[None]:
    """Run a server within the with-block, which begins when the server responds."""
    log = folder / "server.log"
    with open(log, "w") as output:
        child = subprocess.Popen(
            ["bash", "-c", "exec " + command], cwd=folder, env=environment(), stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(url):
            assert child.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(END_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the reader's agent."""
    folder = tmp_path_factory.mktemp("reader") / "my_agent"
    (folder / "path" / "to").mkdir(parents=True)
    model = areal_agents.quickstart.quickstart_model()
    assert model is not None
    (folder / "path" / "to" / "model").symlink_to(model)
    for name in ("tasks.jsonl", "heldout.jsonl", "other.jsonl"):
        (folder / name).write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[str]:
    """The URL of a local engine, in place of the engine on a GPU host."""
    with reserved_ports(1) as (port,):
        command = f"areal-agents engine --model path/to/model --port {port}"
        with started(command, folder, f"http://127.0.0.1:{port}/health"):
            yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def served(folder: Path, engine: str) -> Iterator[str]:
    """The port of a server that is started by the command of the README."""
    with reserved_ports(1) as (port,):
        given = (("8000", str(port)), ("http://gpu-host:30000", engine))
        both = text("README.md", "areal-agents serve --model path/to/model --port 8000", *given)
        on_this_machine, by_url = both.splitlines()
        assert "--engine-url" not in on_this_machine
        command = by_url.partition("  #")[0] + f" --port {port}"
        with started(command, folder, f"http://127.0.0.1:{port}/health"):
            yield str(port)


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """The folder of a run of four steps, with the agent and the configuration of the README."""
    (folder / "agent.py").write_text(text("README.md", "from areal_agents import Episode, episode"))
    (config,) = [b.text for b in blocks("yaml") if b.page == "README.md"]
    (folder / "config.yaml").write_text(config)
    bash(
        "areal-agents train config.yaml"
        + SMALL.replace("steps=1", "steps=4", 1).replace("tokens=8", "tokens=32"),
        folder,
    )
    return folder / "runs" / "my_agent-seed0"


def scope(**names: Any) -> dict[str, Any]:
    return {"OpenAI": OpenAI, "Anthropic": Anthropic, **names}


def test_the_first_run_trains_a_step(tmp_path: Path) -> None:
    script = text(
        "README.md", "areal-agents init my_agent", ("train config.yaml", "train config.yaml" + SMALL + " ")
    )
    assert "trial: the episode was played and rewarded" in bash(script, tmp_path)
    assert json.loads((tmp_path / "my_agent/runs/my_agent-seed0/summary.json").read_text())["steps"] == 1


def test_a_served_agent_is_rewarded_and_trained(folder: Path, served: str) -> None:
    given = (("8000", served), ("messages=[...], tools=[...]", "messages=messages, max_tokens=4"))
    names = scope(messages=MESSAGES)
    exec(text("README.md", "client = OpenAI(", *given), names)  # noqa: S102
    given = (
        ("8000", served),
        ("max_tokens=1024", "max_tokens=4"),
        ("messages=[...], tools=[...]", "messages=messages"),
    )
    message = scope(messages=MESSAGES)
    exec(text("README.md", "client = Anthropic(", *given), message)  # noqa: S102
    assert message["reply"].usage.output_tokens
    header = scope()
    url = ("base_url=..., api_key=...", f"base_url='http://127.0.0.1:{served}/v1', api_key='k'")
    exec(text("docs/serve-and-train.md", "client = OpenAI(", url), header)  # noqa: S102
    grouped = header["client"].chat.completions.create(model="policy", messages=MESSAGES, max_tokens=4)
    port = ("8000", served)
    first = text("README.md", "curl -s localhost:8000/rewards", port, ("chatcmpl-…", names["reply"].id))
    script = text(
        "docs/serve-and-train.md", "curl -s localhost:8000/rewards", port, ("chatcmpl-…", grouped.id)
    )
    for answer in (bash(first, folder), bash(script, folder)):
        assert json.loads(answer)["status"] == "open", answer
    small = " trainer.steps=1 rollout.groups=1 run_dir=runs/from-store name=served"
    there = folder / "trained"
    there.mkdir()
    given = (("path/to/model", "../path/to/model"), ("runs/serve", "../runs/serve"))
    bash(text("README.md", "printf ", *given) + small, there)
    assert (there / "runs/from-store/final/config.json").exists()


# The call of an agent with the key in $ANSWER, in place of the comment about the agent in the scripts.
CALL = """KEY=$(python -c 'import json, sys; print(json.load(sys.stdin)["key"])' <<< "$ANSWER")
curl -s localhost:PORT/e/$KEY/v1/chat/completions -H "$JSON" \\
  -d '{"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "?"}]}' >/dev/null"""


def test_an_episode_over_plain_http(folder: Path, served: str) -> None:
    for script in (text("README.md", "ID=episode-…"), text("docs/protocol.md", "ID=episode-…")):
        lines = script.replace("8000", served).replace("finish\n", "finish >/dev/null\n").splitlines()
        first = next(n for n, line in enumerate(lines) if "/episodes -H" in line)
        lines[first] = "ANSWER=$(" + lines[first].partition("   #")[0] + ")"
        works = next(n for n, line in enumerate(lines) if line.startswith("# … the agent"))
        lines[works] = CALL.replace("PORT", served)
        identified = [
            """ID=$(python -c 'import json, sys; print(json.load(sys.stdin)["id"])' <<< "$ANSWER")"""
            if line.startswith("ID=")
            else line
            for line in lines
        ]
        answer = bash(
            "JSON='Content-Type: application/json'\n" + "\n".join([*identified, "echo", 'echo "$ID"']), folder
        )
        opened = answer.splitlines()[-1]
        found = httpx.get(f"http://127.0.0.1:{served}/episodes/{opened}", timeout=60).json()
        assert found["status"] == "finished" and found["score"] == 1.0


def test_an_integration_runs_with_the_key_of_an_episode(folder: Path, served: str) -> None:
    script = text("integrations/README.md", "curl -s -X POST localhost:8000/episodes", ("8000", served))
    opened = json.loads(bash(script.splitlines()[0], folder))
    script = script.replace("BASE_URL=…", f"BASE_URL={opened['base_url']}").replace(
        "KEY=…", f"KEY={opened['key']}"
    )
    script = script.replace("integrations/", f"{Path(__file__).parents[2]}/integrations/")
    bash("\n".join(script.splitlines()[1:]), folder)
    turns = httpx.get(f"http://127.0.0.1:{served}/episodes/{opened['id']}", timeout=60).json()["turns"]
    assert turns


def test_the_agent_of_the_guide_passes_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(text("docs/agents.md", "from areal_agents import Episode, episode"))
    doctor, train = text("docs/agents.md", "areal-agents doctor").splitlines()
    assert train == "areal-agents train config.yaml"
    assert "the agent can be trained" in bash(doctor, tmp_path)


def test_commands_give_rewards(tmp_path: Path, engine: str, served: str) -> None:
    in_python = text("docs/agents.md", "Episode.from_environment()")
    over_http = text("docs/agents.md", "curl -s ")
    for name, script in (("python.sh", f"python - <<'END'\n{in_python}\nEND"), ("http.sh", over_http)):
        (tmp_path / name).write_text(script)
        opened = httpx.post(f"http://127.0.0.1:{served}/episodes", timeout=60).json()
        bash(
            script,
            tmp_path,
            OPENAI_BASE_URL=opened["base_url"],
            OPENAI_API_KEY=opened["key"],
            AREAL_AGENTS_EPISODE_ID=opened["id"],
        )
        found = httpx.get(f"http://127.0.0.1:{served}/episodes/{opened['id']}", timeout=60).json()
        assert found["score"] == 1.0, (name, found)


def test_a_function_provides_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(text("docs/data.md", "# tasks.py"))
    of_split = {
        split: load_tasks(DataConfig(path=f"{tmp_path / 'tasks.py'}:tasks", split=split)).tasks
        for split in ("train", "test")
    }
    assert len(of_split["train"]) == 200 and of_split["train"][0].input != of_split["test"][0].input


def test_the_reward_functions_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(text("docs/rewards.md", "def score"), names)  # noqa: S102
    branches = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]]
    assert names["score"](FinishedEpisode("e", {"answer": "4"}, branches, "finished", {})) == 1.0
    boxed = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": r"It is \boxed{4}."}]]
    exec(text("docs/rewards.md", "def form"), names)  # noqa: S102
    rewarded = asyncio.run(names["score"](FinishedEpisode("e", {"answer": "4"}, boxed, "finished", {})))
    assert rewarded == {"correct": 1.0, "form": 0.1, "brevity": 0.0}
    exec(text("docs/rewards.md", "score = judge("), names)  # noqa: S102
    exec(text("docs/rewards.md", "rank = group_judge("), names)  # noqa: S102
    assert callable(names["score"]) and callable(names["rank"])


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed; make sandbox-tools")
def test_a_sandbox_runs_from_python(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(text("docs/sandboxes.md", "from pathlib import Path"), names)  # noqa: S102
    for name in "abc":
        (tmp_path / name).touch()
    assert asyncio.run(names["count_files"](tmp_path)) == b"3\n"


def test_the_commands_that_inspect_a_run(folder: Path, run: Path, served: str) -> None:
    opened = httpx.post(f"http://127.0.0.1:{served}/episodes", timeout=60).json()["id"]
    recorded = json.loads(bash("areal-agents episodes ls runs/my_agent-seed0 --json", folder))
    script = text("docs/inspecting.md", "areal-agents tail", ("8000", served))
    script = re.sub("reward EPISODE", f"reward {opened}", script).replace("EPISODE", recorded[0]["id"])
    shown = bash(script, folder)
    assert "my_agent-seed0" in shown and (folder / "good.jsonl").exists()
    given = (("EPISODE", recorded[0]["id"]),)
    assert recorded[0]["id"] in bash(text("docs/evaluating.md", "areal-agents episodes show", *given), folder)


def test_a_run_is_evaluated_exported_and_deployed(folder: Path, run: Path, engine: str) -> None:
    script = text("docs/evaluating.md", "areal-agents eval config.yaml eval.data.path=other.jsonl")
    small = " rollout.limits.max_completion_tokens=8"
    lines = [line.partition(" #")[0] + small for line in script.splitlines()]
    bash("\n".join(lines), folder)
    script = text("docs/deploying.md", "areal-agents export", ("step-20", "step-4"))
    bash(script, folder)
    assert (folder / "exported-20" / "config.json").exists()
    serve = text(
        "docs/deploying.md",
        "areal-agents serve --model runs/my_agent-seed0/final --engine-url",
        ("http://gpu-host:30000", engine),
    )
    with (
        reserved_ports(1) as (port,),
        started(serve + f" --port {port}", folder, f"http://127.0.0.1:{port}/health"),
    ):
        assert (folder / "runs/production/store.db").exists()


def test_a_model_is_trained_on_the_episodes_of_a_run(folder: Path, run: Path) -> None:
    script = text(
        "docs/training.md",
        "areal-agents train config.yaml data.episodes",
        ("algorithm=sft", "algorithm=sft "),
    )
    small = SMALL.replace("eval.episodes=2", "").replace("rollout.groups=2", "rollout.groups=1")
    bash(script + small + " algorithm.sft_min_score=-1", folder)
    assert (folder / "runs/second/final/config.json").exists()


def test_a_simulation_begins_from_a_recorded_run(folder: Path, run: Path) -> None:
    given = (
        ("runs/search_agent-seed0", "runs/my_agent-seed0"), ("runs/x", "runs/my_agent-seed0"),
        ("groups=64 group_size=16", "groups=8 group_size=8"),
    )  # fmt: skip
    assert "GPUs" in bash(
        text("docs/simulator.md", "areal-agents simulate --from runs/search_agent-seed0", *given), folder
    )


@pytest.mark.slow
def test_training_and_evaluating_from_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        text(
            "docs/python.md",
            "import areal_agents as aa",
            (
                "steps=20",
                "steps=1, rollout={'groups': 1, 'group_size': 2, 'limits': {'max_completion_tokens': 4}}",
            ),
        )
        + "\n"
        + text("docs/python.md", "result = aa.evaluate", ("data=tasks", "data=tasks, episodes=2"))
    )
    shown = bash("python train.py", tmp_path)
    assert "trained model" in shown
