"""The reference of configuration keys: complete, current, and consistent with loaded configurations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from areal_agents.config import load_config
from areal_agents.config.origins import annotated
from areal_agents.config.reference import all_keys, explain_key, markdown, schema
from areal_agents.errors import ConfigError

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples/search_agent/config.yaml"


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == markdown(), (
        "run: areal-agents config reference > docs/configuration.md"
    )


def test_every_key_is_described() -> None:
    assert len(all_keys()) > 200
    assert not [key.path for key in all_keys() if not key.description or not key.type]
    assert not [key for key in all_keys() if "typing." in key.type or "<class" in key.type]


def test_every_key_of_a_loaded_configuration_is_listed() -> None:
    known = {key.path for key in all_keys()}
    loaded = load_config(EXAMPLE).model_dump(mode="json")
    assert {path for path in _leaves(loaded) if not path.endswith(".kind")} <= known


def _leaves(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name}
    return found


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("trainer.lr", "trainer.lr"),
        ("lr", "trainer.lr"),
        ("limits.max_turns", "rollout.limits.max_turns"),
        ("algorithm.dual_clip", "algorithm.policy_loss.dual_clip"),
        ("engine.kind", "engine.kind"),
    ],
)
def test_a_key_is_found_by_its_last_parts(name: str, path: str) -> None:
    assert {key.path for key in explain_key(name)} == {path}


def test_a_key_that_several_parts_have_names_the_setting_that_each_needs() -> None:
    assert {key.needs[-1] for key in explain_key("clip_high")} >= {"policy_loss: ppo", "policy_loss: gspo"}


def test_an_unknown_key_is_refused_with_similar_keys() -> None:
    with pytest.raises(ConfigError, match="no configuration key 'trainer.leraning_rate'"):
        explain_key("trainer.leraning_rate")
    with pytest.raises(ConfigError, match=r"did you mean .*trainer\.warmup_steps"):
        explain_key("trainer.warmup_step")
    with pytest.raises(ConfigError, match=r"did you mean rollout\.group_size or proxy\.group_size or "):
        explain_key("grop_size")


def test_the_schema_accepts_valid_configurations_and_refuses_typos() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    example = yaml.safe_load(EXAMPLE.read_text())
    validator.validate(example)
    for algorithm in (
        "dapo",
        {"preset": "grpo"},
        {"policy_loss": "gspo", "clip_high": 0.3},
        {"credit": "episode"},
    ):
        validator.validate({**example, "algorithm": algorithm})
    for wrong in ({"trainr": {}}, {"trainer": {"lrr": 1}}, {"rollout": {"groups": "many"}}, {"seed": -1}):
        assert not validator.is_valid({**example, **wrong})


def test_a_dry_run_names_the_origin_of_each_value() -> None:
    overrides = ["algorithm=dapo", "algorithm.clip_high=0.3", "trainer.steps=3", "proxy.admin_key=hush"]
    page = annotated(EXAMPLE, overrides)
    origins = {
        line.split(":")[0].strip(): line.rpartition("# ")[2] for line in page.splitlines() if "  # " in line
    }
    assert origins["lr"] == origins["clip_low"] == "file"
    assert origins["steps"] == origins["clip_high"] == origins["preset"] == "argument"
    assert origins["overlong_buffer"] == "preset dapo"
    assert origins["max_turns"] == "default"
    assert origins["name"] == "from the folder's name"
    assert "hush" not in page
    assert (
        yaml.safe_load(page)["trainer"] == load_config(EXAMPLE, overrides).model_dump(mode="json")["trainer"]
    )


def test_a_dry_run_shows_where_the_name_of_the_run_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump({"model": str(EXAMPLE.parent / "model"), "agent": "m:a", "data": {"path": "m:t"}})
    )
    for overrides, line in ([], "name: mine # from the file's name"), (["name=x"], "name: x # argument"):
        assert line in [" ".join(shown.split()) for shown in annotated(path, overrides).splitlines()]


def test_a_dry_run_shows_the_loop_that_sets_the_staleness(tmp_path: Path) -> None:
    tree = yaml.safe_load(EXAMPLE.read_text())
    tree["model"], tree["loop"] = str(EXAMPLE.parent / "model"), "sync"
    del tree["rollout"]["max_staleness"]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert "max_staleness: 0" in (page := annotated(path))
    assert next(line for line in page.splitlines() if "max_staleness" in line).endswith("# loop: sync")


def test_a_dry_run_knows_the_short_form_of_a_reward() -> None:
    def origin_of_reward(overrides: list[str]) -> str:
        lines = annotated(EXAMPLE, overrides).splitlines()
        at = next(number for number, line in enumerate(lines) if line.startswith("reward:"))
        return next(line for line in lines[at:] if line.strip().startswith("episode:")).rpartition("# ")[2]

    assert origin_of_reward(["reward=agent.py:score"]) == "argument"
    assert origin_of_reward(["reward={group: agent.py:score}"]) == "default"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("config", "explain", "lr"), "trainer.lr"),
        (("config", "schema"), "json-schema.org"),
        (("train", str(EXAMPLE), "--dry-run", "trainer.lr=3e-4"), "# argument"),
        (("--version",), "areal-agents 0."),
    ],
)
def test_commands_print_the_expected_output_and_write_no_file(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "areal_agents.cli", *arguments],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert expected in done.stdout
    assert not [*tmp_path.iterdir()]  # a dry run writes nothing
    if arguments[-1] == "schema":
        json.loads(done.stdout)
