"""The configuration: every fault is named, with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from areal_agents.config import load_config, proxy_config, save_config
from areal_agents.errors import ConfigError

EXAMPLE = Path(__file__).parent.parent / "examples" / "search_agent" / "config.yaml"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "agent.py").write_text("def agent(task, ep): ...\n")
    tree = {"model": "model", "agent": "agent.py:agent", "data": {"path": "tasks.jsonl"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "mine.yaml"


def test_the_example_is_short_and_valid() -> None:
    config = load_config(EXAMPLE)
    assert config.name == "search_agent"
    assert Path(config.model).is_dir()
    assert len(EXAMPLE.read_text().splitlines()) < 20


def test_paths_are_relative_to_the_file(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir("/")
    config = load_config(minimal)
    assert config.model == str(minimal.parent / "model")
    assert config.agent == f"{minimal.parent / 'agent.py'}:agent"
    assert config.data.path == str(minimal.parent / "tasks.jsonl")
    assert config.name == "mine"


def test_paths_of_overrides_are_relative_to_the_working_directory(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "other").mkdir(parents=True)
    (elsewhere / "other" / "config.json").write_text("{}")
    monkeypatch.chdir(elsewhere)
    config = load_config(minimal, ["model=other"])
    assert config.model == str(elsewhere / "other")
    assert config.run_dir == str(elsewhere / "runs" / "mine-seed0")


def test_what_is_not_a_file_stays_as_it_is(minimal: Path) -> None:
    assert load_config(minimal, ["data.path=org/data-set"]).data.path == "org/data-set"
    assert load_config(minimal, ["agent=package.module:agent"]).agent == "package.module:agent"


def test_overrides_reach_inside(minimal: Path) -> None:
    config = load_config(minimal, ["trainer.steps=7", "trainer.lr=1e-3", "seed=2", "eval.data.path=x"])
    assert (config.trainer.steps, config.trainer.lr, config.seed) == (7, 1e-3, 2)
    assert config.eval is not None and config.eval.data.path == "x"
    assert config.run_dir.endswith("mine-seed2")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stpes=7", "unknown key 'trainer.stpes'; did you mean 'trainer.steps'?"),
        ("rolout.groups=3", "unknown key 'rolout'; did you mean 'rollout'?"),
        ("eval.data.pth=3", "unknown key 'eval.data.pth'; did you mean 'eval.data.path'?"),
        ("trainer.steps=zero", "trainer.steps"),
        ("trainer.steps=0", "trainer.steps"),
        ("trainer.steps", "expected key=value"),
        ("trainer.steps=[", "not valid YAML"),
        ("model=nowhere", "not a Hugging Face model folder"),
        ("engine.kind=sglang", "urls"),
    ],
)
def test_faults_are_named(minimal: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [override])
    assert message in str(caught.value)


def test_a_missing_file_and_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(tmp_path / "list.yaml")


def test_what_is_saved_loads_as_the_same_tree(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal, ["trainer.steps=7"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("setting", ["admin_key=ep-mine", "project_keys=[good, '']", "project_keys=[ep-x]"])
def test_a_key_that_could_never_work_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="does not begin with ep-"):
        proxy_config([setting])
