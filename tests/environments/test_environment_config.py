"""`environment:` in a configuration sets the agent, the tasks and the evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.rollout.data import load_tasks

COUNTER = "tools:example_environments.py:Counter"
FILE = Path(__file__).parent / "example_environments.py"


def load(tmp_path: Path, *overrides: str, **settings: Any) -> Config:
    """Load a configuration from a folder that also has a model and the example classes."""
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / FILE.name).write_text(FILE.read_text())
    (tmp_path / "tasks.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": "model", **settings}))
    return load_config(tmp_path / "config.yaml", list(overrides))


def test_a_line_sets_the_agent_the_tasks_and_the_held_out_tasks(tmp_path: Path) -> None:
    config = load(tmp_path, environment=COUNTER)
    use = f"tools:{tmp_path / FILE.name}:Counter"
    assert config.environment is not None and config.environment.use == use
    assert config.agent == {"environment": use}
    assert [task.id for task in load_tasks(config.data).tasks] == ["train-1", "train-2", "train-3"]
    assert config.eval is not None
    assert [task.id for task in load_tasks(config.eval.data).tasks] == ["eval-100", "eval-101", "eval-102"]
    assert Config.model_validate(config.model_dump(mode="json")) == config  # as a run's processes read it


def test_explicit_settings_are_kept(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "environment.python=/usr/bin/python3",
        environment={"use": COUNTER},
        data={"epochs": 2},
        eval={"episodes": 2},
    )
    assert config.agent == {"environment": config.environment.use, "python": "/usr/bin/python3"}  # type: ignore[union-attr]
    assert config.data.epochs == 2 and config.data.environment == config.environment
    assert config.eval is not None and config.eval.episodes == 2 and config.eval.data.split == "eval"
    assert load(tmp_path, environment=COUNTER, eval=None).eval is None
    own = load(tmp_path, environment=COUNTER, data={"path": "tasks.jsonl"})
    assert own.data.environment is None and own.eval is None
    assert load(tmp_path, f"environment=tools:{FILE}:Attribute").environment.use.startswith("tools:/")  # type: ignore[union-attr]


def test_several_environments_share_a_run(tmp_path: Path) -> None:
    config = load(tmp_path, environments=[COUNTER, {"use": COUNTER, "name": "twice", "weight": 2}])
    use = f"tools:{tmp_path / FILE.name}:Counter"
    assert [(one.name, one.use) for one in config.environments] == [("Counter", use), ("twice", use)]
    assert config.agent == {"environments": [{"name": "Counter", "use": use}, {"name": "twice", "use": use}]}
    tasks = load_tasks(config.data)
    assert {task.id for task in tasks.tasks} == {
        f"{name}/train-{n}" for name in ("Counter", "twice") for n in (1, 2, 3)
    }
    assert config.eval is not None
    held_out = load_tasks(config.eval.data).epoch(0)
    assert [task.id.partition("/")[0] for task in held_out[:3]].count("twice") == 2
    assert all("/eval-" in task.id for task in held_out)
    assert Config.model_validate(config.model_dump(mode="json")) == config  # as a run's processes read it


def test_one_of_several_environments_may_use_tasks_of_the_user(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        environments=[{"use": COUNTER, "name": "count"}],
        data={"sources": [{"name": "count", "path": "tasks.jsonl"}]},
    )
    assert config.data.sources[0].path == str(tmp_path / "tasks.jsonl") and config.eval is None
    (task,) = load_tasks(config.data).tasks
    assert task.input == {"question": "?", "data_source": "count"}


def test_relative_paths_are_resolved_from_the_folder_of_the_configuration(tmp_path: Path) -> None:
    for given, absolute in (
        (
            "nemo-gym:http://host?rows=tasks.jsonl&size=1",
            f"nemo-gym:http://host?rows={tmp_path}/tasks.jsonl&size=1",
        ),
        ("harbor:model?held_out=tasks.jsonl", f"harbor:{tmp_path}/model?held_out={tmp_path}/tasks.jsonl"),
        ("openenv:python tasks.jsonl {port}", f"openenv:python {tmp_path}/tasks.jsonl '{{port}}'"),
        ("gymnasium:FrozenLake-v1?map_name=model", "gymnasium:FrozenLake-v1?map_name=model"),
    ):
        config = load(tmp_path, environment=given)
        assert config.environment is not None and config.environment.use == absolute


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"environment": "countdown"}, "an environment is scheme:name"),
        ({"environment": "foo:bar"}, r"there is no environment scheme 'foo' \('foo:bar'\); there are "),
        ({"environment": COUNTER, "agent": "agent.py:agent"}, "it takes the place of the agent"),
        ({"environment": "mcp:python server.py", "data": {"path": "tasks.jsonl"}}, "gives no reward"),
        ({"environment": "textarena:A-v0", "data": {"path": "tasks.jsonl"}}, "has tasks of its own; leave"),
        ({"environment": {"use": COUNTER, "data": 1}}, "environment.data"),
        ({"environment": COUNTER, "data": {"path": "a.jsonl", "environment": COUNTER}}, "tasks of its own"),
        ({"environments": [COUNTER, COUNTER]}, "the names of sources must differ, got Counter, Counter"),
        ({"environments": [COUNTER], "environment": COUNTER}, "give them, or one environment"),
        ({"environments": [COUNTER], "agent": "agent.py:agent"}, "it takes the place of the agent"),
        ({"environments": ["foo:bar"]}, "no environment scheme 'foo'"),
        ({"environments": [COUNTER], "data": {"path": "tasks.jsonl"}}, "tasks are in data.sources, by the"),
        (
            {"environments": [COUNTER], "data": {"sources": [{"name": "x", "path": "tasks.jsonl"}]}},
            "there is no environment 'x'; there are Counter",
        ),
    ],
)
def test_faults_are_named(tmp_path: Path, settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load(tmp_path, **settings)
