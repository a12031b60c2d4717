"""Settings as parts: flat and nested forms, refused settings, and settings in config files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field, ValidationError

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.estimators import GroupEstimator
from areal_agents.algorithms.credit.returns import OwnReturn, RewardToGo, TurnGroups
from areal_agents.algorithms.losses.gspo import GspoLoss
from areal_agents.algorithms.parts import Part, alternatives, differing, fill, settings_of
from areal_agents.algorithms.presets import PRESETS
from areal_agents.config import load_config, save_config
from areal_agents.errors import ConfigError


class Round(Part):
    kind: Literal["round"] = "round"
    radius: float = 1.0


class Square(Part):
    kind: Literal["square"] = "square"
    side: float = Field(default=1.0, gt=0)
    size: int = 1


class Border(Part):
    kind: Literal["border"] = "border"
    width: float = 1.0


class Nothing(Part):
    kind: Literal["none"] = "none"


class Look(Part):
    colour: str = "red"
    shape: Annotated[Round | Square, Field(discriminator="kind")] = Field(default_factory=Round)


class Scene(BaseModel):
    look: Look = Field(default_factory=Look)
    frame: Annotated[Nothing | Border, Field(discriminator="kind")] = Field(default_factory=Nothing)
    title: str = ""


def filled(preset: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    return fill(Scene, given, preset or {})


def test_settings_of_a_part_and_alternatives_of_a_field_are_listed() -> None:
    assert dict(settings_of(Look)) == {
        "colour": "", "shape": "", "radius": "shape: round", "side": "shape: square", "size": "shape: square",
    }  # fmt: skip
    assert alternatives(Scene.model_fields["frame"]) == {"none": Nothing, "border": Border}
    assert alternatives(Scene.model_fields["look"]) == {"": Look}
    assert alternatives(Scene.model_fields["title"]) == {}


def test_without_settings_the_defaults_apply() -> None:
    tree = filled()
    assert Scene.model_validate(tree) == Scene()
    assert tree == {"look": {"shape": {"kind": "round"}}, "frame": {"kind": "none"}}


@pytest.mark.parametrize(
    "given",
    [
        {"radius": 2.0},
        {"shape": {"radius": 2.0}},
        {"shape": "round", "radius": 2.0},
        {"look": {"shape": {"kind": "round", "radius": 2.0}}},
        {"look": {"radius": 2.0}},
        {"look": {"shape": "round"}, "radius": 2.0},
        {"shape": Round(radius=2.0)},
    ],
)
def test_flat_and_nested_settings_are_equivalent(given: dict[str, Any]) -> None:
    assert Scene.model_validate(filled(**given)) == Scene(look=Look(shape=Round(radius=2.0)))


def test_a_setting_selects_its_part_only_if_no_other_part_is_selected() -> None:
    assert filled(width=3.0)["frame"] == {"kind": "border", "width": 3.0}
    with pytest.raises(ValueError, match="width: 3.0 needs frame: border"):
        filled(width=3.0, frame="none")
    with pytest.raises(ValueError, match="side: 3.0 needs shape: square"):
        filled(side=3.0)  # a shape is selected by default, and it is round


def test_settings_override_the_preset_and_another_kind_drops_the_presets_part() -> None:
    preset = {"shape": "square", "side": 4.0, "size": 2, "colour": "blue"}
    assert filled(preset)["look"] == {"colour": "blue", "shape": {"kind": "square", "side": 4.0, "size": 2}}
    assert filled(preset, size=9)["look"]["shape"] == {"kind": "square", "side": 4.0, "size": 9}
    assert filled(preset, shape="round")["look"] == {"colour": "blue", "shape": {"kind": "round"}}


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        ({"colr": "blue"}, ["unknown setting colr; did you mean 'colour'?"]),
        (
            {"zzzzz": 1},
            ["unknown setting zzzzz; known: colour, frame, radius, shape, side, size, title, width"],
        ),
        ({"shape": "squre"}, ["shape: there is no 'squre'; did you mean 'square'? Known: round, square"]),
        ({"shape": {"kind": ["round"]}}, ["shape: there is no ['round']; did you mean"]),
        ({"shape": {"kind": "round", "side": 1.0}}, ["unknown setting shape.side; known: radius"]),
        ({"shape": {"radus": 1.0}}, ["unknown setting shape.radus; did you mean 'radius'?"]),
        ({"shape": 7}, ["shape must be one of round, square, or a mapping, got 7"]),
        ({"shape": None}, ["shape must be one of round, square, or a mapping, got null"]),
        ({"radius": 1.0, "shape": {"radius": 1.0}}, ["radius is given twice, on its own and in shape"]),
        ({"radius": 1.0, "look": {"radius": 1.0}}, ["radius is given twice, on its own and in look"]),
        ({"frame": "none", "width": 1.0, "colr": 1}, ["width: 1.0 needs", "did you mean 'colour'"]),
    ],
)
def test_all_misplaced_settings_are_refused_at_once(given: dict[str, Any], faults: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        filled(**given)
    assert all(fault in str(caught.value) for fault in faults), caught.value


def test_differing_settings_are_flat() -> None:
    look = Look(colour="blue", shape=Round(radius=2.0))
    assert dict(differing(look, Look())) == {"colour": "blue", "radius": 2.0}
    assert dict(differing(Look(shape=Square()), Look())) == {"shape": "square"}


@pytest.mark.parametrize(
    ("flat", "nested"),
    [
        ({"preset": "dapo", "clip_high": 0.3}, {"preset": "dapo", "policy_loss": {"clip_high": 0.3}}),
        ({"clip_high": 0.3}, {"policy_loss": {"kind": "ppo", "clip_high": 0.3}}),
        ({"policy_loss": "gspo", "gspo_level": "turn"}, {"policy_loss": GspoLoss(gspo_level="turn")}),
        (
            {"credit": "reward_to_go", "turn_discount": 0.9},
            {"estimator": {"kind": "group", "credit": {"kind": "reward_to_go", "turn_discount": 0.9}}},
        ),
        ({"credit": "reward_to_go", "turn_discount": 0.9}, {"credit": RewardToGo(turn_discount=0.9)}),
        (
            {"overlong_limit": 9, "overlong_buffer": 3, "reward_clip": 2.0},
            {
                "rewards": {
                    "reward_clip": 2.0,
                    "length_penalty": {"kind": "linear", "overlong_limit": 9, "overlong_buffer": 3},
                }
            },
        ),
        ({"m2po_threshold": 0.1}, {"trust_region": {"kind": "m2po", "m2po_threshold": 0.1}}),
        ({"kl_in": "loss", "kl_coefficient": 0.1}, {"kl_in": {"kind": "loss", "kl_coefficient": 0.1}}),
        ({"correction": "mask", "weight_floor": 0.5}, {"correction": {"kind": "mask", "weight_floor": 0.5}}),
    ],
)
def test_flat_and_nested_settings_of_an_algorithm_are_equivalent(
    flat: dict[str, Any], nested: dict[str, Any]
) -> None:
    made = AlgorithmConfig.model_validate(flat)
    assert made == AlgorithmConfig.model_validate(nested)
    assert made != AlgorithmConfig(preset=flat.get("preset", "decoupled_ppo"))


def test_an_algorithm_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        AlgorithmConfig().policy_loss.clip_high = 0.3  # type: ignore[union-attr, misc]


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "agent.py").write_text("def agent(task, ep): ...\n")
    tree = {"model": "model", "agent": "agent.py:agent", "data": {"path": "tasks.jsonl"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "mine.yaml"


def with_algorithm(path: Path, algorithm: Any) -> Path:
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "algorithm": algorithm}))
    return path


@pytest.mark.parametrize(
    ("algorithm", "overrides", "expected"),
    [
        (
            {"policy_loss": "gspo"},
            ["algorithm.policy_loss.clip_high=0.3"],
            {"policy_loss": "gspo", "clip_high": 0.3},
        ),
        ({"policy_loss": "gspo"}, ["algorithm.clip_high=0.3"], {"policy_loss": "gspo", "clip_high": 0.3}),
        (
            {"policy_loss": {"kind": "gspo", "clip_high": 0.5}},
            ["algorithm.clip_high=0.3"],
            {"policy_loss": "gspo", "clip_high": 0.3},
        ),
        (
            {"policy_loss": "gspo", "clip_high": 0.5},
            ["algorithm.policy_loss.clip_high=0.3"],
            {"policy_loss": "gspo", "clip_high": 0.3},
        ),
        ("gspo", ["algorithm.policy_loss.clip_high=0.3"], {"preset": "gspo", "clip_high": 0.3}),
        ("gspo", ["algorithm.policy_loss=ppo"], {"preset": "gspo", "policy_loss": "ppo"}),
        (
            {"policy_loss": {"kind": "gspo", "clip_high": 0.5}},
            ["algorithm.policy_loss=cispo"],
            {"policy_loss": "cispo"},
        ),
        (
            {"estimator": {"credit": "reward_to_go"}},
            ["algorithm.estimator.credit.turn_discount=0.5"],
            {"credit": "reward_to_go", "turn_discount": 0.5},
        ),
        (
            {"credit": "reward_to_go"},
            ["algorithm.credit.turn_discount=0.5"],
            {"credit": "reward_to_go", "turn_discount": 0.5},
        ),
    ],
)
def test_overrides_reach_into_parts(
    minimal: Path, algorithm: Any, overrides: list[str], expected: dict[str, Any]
) -> None:
    config = load_config(with_algorithm(minimal, algorithm), overrides)
    assert config.algorithm == AlgorithmConfig.model_validate(expected)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"clip_low": 2.0}, "algorithm.policy_loss.clip_low: Input should be less than 1 (got 2.0)"),
        (
            {"policy_loss": "gspo", "clip_low": 2.0},
            "algorithm.policy_loss.clip_low: Input should be less than 1",
        ),
        ({"kl_in": "loss"}, "'algorithm.kl_in.kl_coefficient' is required"),
        ({"overlong_limit": 9}, "'algorithm.rewards.length_penalty.overlong_buffer' is required"),
        (
            {"credit": "reward_to_go", "turn_discount": 2},
            "algorithm.estimator.credit.turn_discount: Input should be",
        ),
        (
            {"credit": "step_normalized", "leave_one_out": True},
            "algorithm.estimator: leave_one_out: true has no",
        ),
        (
            {"preset": "distillation", "distill_top_k": 8},
            "algorithm.policy_loss: distill_top_k: 8 has no meaning for teacher: model",
        ),
        ({"policy_loss": "gsop"}, "algorithm: policy_loss: there is no 'gsop'; did you mean 'gspo'?"),
        ({"clip_hihg": 0.3}, "algorithm: unknown setting clip_hihg; did you mean 'clip_high'?"),
        (
            {"correction_action": "mask"},
            "algorithm: unknown setting correction_action; did you mean 'correction'?",
        ),
        (
            {"policy_loss": {"clip_high": 0.1}, "clip_high": 0.2},
            "clip_high is given twice, on its own and in policy_loss",
        ),
    ],
)
def test_errors_name_settings_by_their_path_in_the_config_file(
    minimal: Path, algorithm: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(with_algorithm(minimal, algorithm))
    assert message in str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_saved_config_has_the_same_algorithm(minimal: Path, tmp_path: Path, preset: str) -> None:
    needed = [f"trainer.teacher_model={minimal.parent / 'model'}"] if preset == "distillation" else []
    config = load_config(with_algorithm(minimal, preset), ["trainer.steps=7", *needed])
    save_config(config, tmp_path / "saved.yaml")
    again = load_config(tmp_path / "saved.yaml")
    assert again == config and again.algorithm == AlgorithmConfig(preset=preset)


@pytest.mark.parametrize(
    "settings",
    [
        {"turn_return": "own"},
        {"credit": {"turn_return": "own"}},
        {"estimator": {"credit": {"kind": "turn_groups", "turn_return": "own"}}},
    ],
)
def test_own_turn_rewards_take_no_discount_from_a_preset_in_any_form(settings: dict[str, Any]) -> None:
    given = AlgorithmConfig.model_validate({"preset": "gigpo", **settings})
    assert isinstance(given.estimator, GroupEstimator) and isinstance(given.estimator.credit, TurnGroups)
    assert given.estimator.credit == TurnGroups(turn_return=OwnReturn())
    assert AlgorithmConfig.model_validate(given.model_dump()) == given


def test_settings_are_read_without_torch() -> None:
    """The proxy and the rollout process read the settings, but do not use torch."""
    code = (
        "import sys; from areal_agents.algorithms.config import AlgorithmConfig; "
        "[AlgorithmConfig(preset=name) for name in ('gspo', 'dapo', 'ppo', 'dpo', 'm2po')]; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
