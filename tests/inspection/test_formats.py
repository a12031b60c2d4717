"""Exports in the formats of other programs, whose own models check them if the environments are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import datasets
import pytest
from inspection_support import Recorded
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.errors import ConfigError
from areal_agents.evaluation.stored import stored_episode
from areal_agents.inspection.formats.conversations import preference_rows
from areal_agents.inspection.sources import opened
from areal_agents.rollout.rewarding import finished_episode
from areal_agents.store import Store


def exported(recorded: Recorded, out: Path, form: str, *more: str) -> Path:
    given = ["episodes", "export", str(recorded.store), str(out), "--format", form, *more]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_atif_has_every_call_once_with_its_tokens(recorded: Recorded, tmp_path: Path) -> None:
    folder = exported(recorded, tmp_path / "atif", "atif")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(
        [f"{recorded.branching}-0.json", f"{recorded.branching}-1.json", f"{recorded.failed}-0.json",
         f"{recorded.evaluated}-0.json"]
    )  # fmt: skip
    first = json.loads((folder / f"{recorded.branching}-0.json").read_text())
    assert [step["source"] for step in first["steps"]] == ["user", "agent", "agent"]
    assert [step["step_id"] for step in first["steps"]] == [1, 2, 3]
    called = first["steps"][1]
    assert called["tool_calls"][0]["arguments"] == {"query": "Lyon"}
    assert called["observation"]["results"] == [
        {"content": "In France", "source_call_id": called["tool_calls"][0]["tool_call_id"]}
    ]
    with opened(str(recorded.store)) as source:
        turns = source.get(recorded.branching)["turns"]
    for step, turn in zip(first["steps"][1:], turns[:2], strict=True):
        assert step["metrics"]["prompt_token_ids"] == list(turn["prompt_ids"])
        assert step["metrics"]["completion_token_ids"] == list(turn["token_ids"])
        assert step["metrics"]["logprobs"] == pytest.approx(list(turn["logprobs"]))
    assert first["extra"]["score"] == 0.75


def test_a_training_trace_masks_tokens_that_the_policy_did_not_sample(
    recorded: Recorded, tmp_path: Path
) -> None:
    (trace,) = lines(exported(recorded, tmp_path / "t.jsonl", "openenv", "--min-reward", "0.5"))
    assert len(trace["turns"]) == 3 and trace["turns"][0]["metadata"]["score"] == 0.75
    for turn in trace["turns"]:
        prompt, completion = turn["prompt_token_ids"], turn["completion_token_ids"]
        assert len(turn["per_token_logps"]) == len(completion)
        assert turn["loss_mask"] == [0] * len(prompt) + [1] * len(completion)


def test_exports_for_sft_contain_the_selected_conversations(recorded: Recorded, tmp_path: Path) -> None:
    rows = lines(exported(recorded, tmp_path / "m.jsonl", "messages", "--min-reward", "0.5"))
    assert [[m["role"] for m in row["messages"]] for row in rows] == [
        ["user", "assistant", "tool", "assistant"],
        ["user", "assistant"],
    ]
    assert rows[0]["messages"][1]["tool_calls"][0]["function"]["name"] == "search"
    assert set(rows[0]) == {"messages"}
    found = datasets.load_from_disk(str(exported(recorded, tmp_path / "sft", "sft", "--min-reward", "0.5")))
    assert found.num_rows == 2 and found[0]["score"] == 0.75
    for split, rows_of_split in (((), 3), (("--split", "all"), 4), (("--split", "eval"), 1)):
        folder = exported(recorded, tmp_path / f"sft{rows_of_split}", "sft", *split)
        assert datasets.load_from_disk(str(folder)).num_rows == rows_of_split
        shutil.rmtree(folder)
    assert [m["content"] for m in found[1]["messages"]][0] == "Other"
    with pytest.raises(ConfigError, match="exists; give a folder that does not"):
        exported(recorded, tmp_path / "sft", "sft")
    with pytest.raises(ConfigError, match="give the format with --format"):
        CliRunner().invoke(
            app, ["episodes", "export", str(recorded.store), str(tmp_path / "x.txt")], catch_exceptions=False
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.jsonl", "sft"]


def test_a_pair_has_one_prompt_and_two_different_scores(recorded: Recorded, tmp_path: Path) -> None:
    with opened(str(recorded.store)) as source:
        better = {**source.get(recorded.evaluated), "score": 1.0}
        worse = {**source.get(recorded.failed), "task": better["task"], "score": 0.0}
    (pair,) = preference_rows([worse, better])
    assert [m["content"] for m in pair["prompt"]] == ["Where is Lyon?"]
    assert (pair["score_chosen"], pair["score_rejected"]) == (1.0, 0.0)
    assert list(preference_rows([worse, {**better, "score": 0.0}])) == []
    with pytest.raises(ConfigError, match="no scores of one task differ"):
        exported(recorded, tmp_path / "pairs", "pairs", "--task", "t2")


def test_a_stored_episode_equals_the_one_that_the_reward_function_was_given(recorded: Recorded) -> None:
    state = recorded.proxy.http.get(f"/episodes/{recorded.branching}").json()
    with Store.open(recorded.store) as store:
        assert stored_episode(store.load_episode(recorded.branching)) == finished_episode(
            state, truncated=False
        )


CHECKS = {
    "openenv": "from openenv.core.harness.training import TrainingTrace\n"
    "for line in open(path): TrainingTrace.model_validate_json(line)",
    "atif": "from pathlib import Path\nfrom harbor.models.trajectories import Trajectory\n"
    "for file in Path(path).iterdir(): Trajectory.model_validate_json(file.read_text())",
}


@pytest.mark.environments
@pytest.mark.parametrize("form", CHECKS)
def test_the_real_models_accept_the_export(
    recorded: Recorded, tmp_path: Path, form: str, request: pytest.FixtureRequest
) -> None:
    python = Path(request.config.getoption("--environments")).absolute()
    if form == "atif":
        environment = python.parents[1]
        python = environment.with_name(f"{environment.name}-harbor") / "bin" / "python"
        if not python.exists():
            pytest.skip(f"there is no {python}: make environments-harbor PYTHON312=python3.12")
    path = exported(recorded, tmp_path / "out", form)
    code = f"path = {str(path)!r}\n{CHECKS[form]}"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
