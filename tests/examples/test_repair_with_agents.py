"""Claude Code, Codex and Qwen Code play a repair task in a group of two, and one real step is trained on it.

The programs come from npm (`integrations/cli`) and the model's replies from a script. Everything else is a
real run of the example's configuration for the agent. The tests are slow, because each of them installs and
starts a large program.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import repairs
import torch
from real_tokenizers import qwen_folder
from repairs import TEST, Repair, sample_repair, train_tasks
from scripted_runs import CONTEXT, trained_step
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from areal_agents.store import Store
from areal_agents.testing import Script, ScriptedCall
from integrations.conversations import call
from integrations.environments import FOLDER, node_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "repair_tasks"
ON_THIS_MACHINE = (
    'profile=""', 'engine.python=""', "algorithm.preset=grpo", "trainer.lr=1e-4", "rollout.group_size=2",
    "rollout.concurrency=2",
)  # fmt: skip
CLAIM = "It is repaired."

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def by_shell(tool: str, argument: str, command: str, **more: Any) -> str:
    return call(tool, json.dumps({argument: command, **more}))


def of_claude_code(repair: Repair, folder: str) -> list[str]:
    file = f"{folder}/{repair.wanted.file}"
    # Claude Code sends the call back with the default of replace_all, which the model leaves out.
    edit = {"file_path": file, **replacing(repair)}
    return [
        call("Read", json.dumps({"file_path": file})),
        call("Edit", json.dumps(edit)),
        by_shell("Bash", "command", f"python3 {TEST}", description="Run the test"),
    ]


def of_codex(repair: Repair, folder: str) -> list[str]:
    file, code = repair.wanted.file, repair.wanted.code
    commands = (f"cat {file}", f"sed -i 's/return .*/{code}/' {file}", f"python3 {TEST}")
    return [by_shell("exec_command", "cmd", command) for command in commands]


def of_qwen_code(repair: Repair, folder: str) -> list[str]:
    file = f"{folder}/{repair.wanted.file}"
    return [
        call("read_file", json.dumps({"file_path": file})),
        call("edit", json.dumps({"file_path": file, **replacing(repair)})),
        by_shell("run_shell_command", "command", f"python3 {TEST}", is_background=False),
    ]


def replacing(repair: Repair) -> dict[str, str]:
    return {"old_string": repair.broken.code, "new_string": repair.wanted.code}


AGENTS: dict[str, Callable[[Repair, str], list[str]]] = {
    "claude-code": of_claude_code,
    "codex": of_codex,
    "qwen-code": of_qwen_code,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and Qwen's own vocabulary."""
    folder = tmp_path_factory.mktemp("qwen") / "model"
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder())
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((qwen_folder() / name).read_bytes())
    return folder


def one_repairs(calls: Callable[[str], list[str]]) -> Script:
    """A script that repairs the file in the episode that calls first, and only claims to in the other."""
    first_prompts = 0

    def script(seen: ScriptedCall) -> str:
        nonlocal first_prompts
        results = seen.prompt_text.count("<tool_response>")
        first_prompts += results == 0
        if results == 0 and first_prompts > 1:
            return CLAIM
        folder = re.search(r"/[\w/.-]*areal-agents-cli-\w+/work", seen.prompt_text)
        assert folder is not None, "the agent tells the model where it works"
        return [*calls(folder[0]), CLAIM][results]

    return script


@pytest.mark.parametrize("agent", AGENTS)
def test_a_group_is_played_through_the_real_program_and_trained(
    agent: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repairs, "TASKS", tmp_path / "tasks")
    programs = ":".join(map(str, node_environment(FOLDER / "cli").programs))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    task = train_tasks()[0]
    repair = sample_repair(random.Random("train/0"), held_out=False)  # the same task
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(task) + "\n")

    row = trained_step(
        EXAMPLE / f"config.{agent}.yaml",
        model,
        one_repairs(lambda folder: AGENTS[agent](repair, folder)),
        tmp_path / "run",
        [*ON_THIS_MACHINE, f"data.path={tasks}"],
    )

    # The grader of the example rewards the files that the programs left in their folders.
    assert (row["episodes"], row["reward_mean"], row["groups_solved_some"]) == (2, 0.5, 1)
    assert (row["failed_episodes"], row["groups_bad"], row["truncated"]) == (0, 0, 0)
    # Each episode is one branch: every prompt continues the recorded tokens of the previous call.
    assert (row["turns_mean"], row["branches_mean"], row["forks"]) == (2.5, 1.0, {})
    # Every sampled token is trained, in one step.
    assert row["tokens"] == row["sampled_tokens"] > 0 and row["untrained_tokens"] == 0
    assert (row["step"], row["version"], row["skipped_steps"]) == (1, 1, 0) and row["grad_norm"] > 0
    with Store.open(tmp_path / "run" / "store.db") as store:
        prompts = [
            len(episode.forest.prompt_ids(turn.id))
            for episode in store.load_episodes([summary.id for summary in store.episodes()])
            for turn in episode.turns
        ]
    assert len(prompts) == 5 and min(prompts) > 1_000  # the agent's own instructions and tools
