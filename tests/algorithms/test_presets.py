"""Presets: their settings, overrides, refused settings, and agreement with the documentation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.parts import alternatives, settings_of
from areal_agents.algorithms.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def config(**given: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(given)


def documented() -> dict[str, tuple[dict[str, Any], str]]:
    """Preset → (its settings, its papers), from the table of the documentation."""
    section = DOCS.read_text().split("## Presets")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    found = {}
    for name, advantage, loss, paper in rows:
        settings: dict[str, Any] = {}
        for setting in re.findall(r"`([^`]+)`", advantage + loss):
            settings |= yaml.safe_load(setting)
        found[name.strip().strip("`")] = (settings, paper)
    return found


def test_the_documentation_lists_the_settings_and_the_paper_of_each_preset() -> None:
    table = documented()
    assert list(table) == list(PRESETS)
    for name, (settings, paper) in table.items():
        assert settings == dict(PRESETS[name]), name
        assert re.search(r"arXiv \d{4}\.\d{5}", paper), name


def kinds(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Every part with each of its kinds, including parts within parts."""
    for name, field in model.model_fields.items():
        for kind, part in alternatives(field).items():
            if kind:
                yield name, kind
            yield from kinds(part)


def test_the_documentation_names_every_setting_and_every_kind_of_part() -> None:
    table = DOCS.read_text().split("## Parts")[1].split("\n## ")[0]
    named = set(re.findall(r"`([^`]+)`", table))
    names = {setting.split(":")[0] for setting in named}
    assert {name for name, _ in settings_of(AlgorithmConfig)} - names == {"preset"}
    assert {f"{name}: {kind}" for name, kind in kinds(AlgorithmConfig)} - named == set()


def test_the_documentation_names_only_settings_that_exist() -> None:
    known = {name for name, _ in settings_of(AlgorithmConfig)} | {"rewards"}
    pairs = {f"{name}: {kind}" for name, kind in kinds(AlgorithmConfig)}
    choices = {name for name, _ in kinds(AlgorithmConfig)}
    for section in ("## Parts", "## What is refused"):
        for setting in re.findall(r"`([^`]+)`", DOCS.read_text().split(section)[1].split("\n## ")[0]):
            name, _, value = setting.partition(": ")
            if re.fullmatch(r"[a-z0-9_]+", name) and value:
                assert name in known, setting
                assert name not in choices or setting in pairs, setting


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without their parts; the name of a part is mapped to its kind."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            inner = dict(value)
            found |= ({name: inner.pop("kind")} if "kind" in inner else {}) | flat(inner)
        else:
            found[name] = value
    return found


# The defaults of settings of parts that decoupled PPO does not use.
ELSEWHERE = {
    "distill_top_k": 64,
    "dppo_divergence": "tv",
    "dppo_high": 0.2,
    "dppo_kl_coefficient": 0.001,
    "dppo_low": 0.2,
    "episode_return": "score",
    "gspo_level": "sequence",
    "normalize_batch": True,
    "reward_weights": {},
    "turn_discount": 1.0,
    "std_estimator": "sample",
    "value_coefficient": 1.0,
    "sft_min_score": None,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_parts_and_nothing_else(name: str) -> None:
    made = AlgorithmConfig.model_validate(name)
    assert made == config(preset=name) == AlgorithmConfig(preset=name)
    got, given = flat(made.model_dump()), dict(PRESETS[name])
    assert {setting: got[setting] for setting in given} == given
    if name in ("sft", "dpo"):  # follows from a loss without advantages
        given |= {"estimator": "none", "correction": "none"}
    if made.teacher is not None:
        given |= {"estimator": "none", "correction": "none", "drop_equal_groups": False}
    default = flat(AlgorithmConfig().model_dump())
    rest = {setting: value for setting, value in got.items() if setting not in given and setting != "preset"}
    assert rest == {setting: {**ELSEWHERE, **default}[setting] for setting in rest}


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_loads_unchanged_from_its_full_dump(name: str) -> None:
    made = config(preset=name)
    assert AlgorithmConfig.model_validate(made.model_dump(mode="json")) == made


def test_the_default_is_decoupled_ppo_with_these_settings() -> None:
    made = flat(AlgorithmConfig().model_dump())
    assert made == {
        "preset": "decoupled_ppo", "estimator": "group", "credit": "episode", "advantage_mean": "group",
        "advantage_std": "group", "std_estimator": "sample", "leave_one_out": False,
        "advantage_statistics": "episode", "reward_scale": 1.0, "reward_bias": 0.0, "reward_clip": None,
        "length_penalty": "none", "policy_loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None,
        "correction": "truncate", "correction_level": "token", "weight_cap": 5.0, "veto": None,
        "trust_region": "none", "loss_normalization": "token", "kl_in": "none", "proximal": "batch",
        "minibatches": 1, "entropy_coefficient": 0.0, "drop_equal_groups": True,
        "refill_equal_groups": False, "replay": "none", "observation_coefficient": 0.0,
        "truncated": "score", "train_constrained": False, "exclude_labels": (),
    }  # fmt: skip


def test_given_settings_override_the_preset() -> None:
    shorter = flat(config(preset="dapo", clip_high=0.3, overlong_limit=5000).model_dump())
    assert (shorter["clip_high"], shorter["overlong_limit"], shorter["overlong_buffer"]) == (0.3, 5000, 4096)
    assert flat(config(preset="gspo", clip_low=0.1).model_dump())["clip_low"] == 0.1
    assert flat(config(preset="rloo", leave_one_out=False).model_dump())["leave_one_out"] is False


@pytest.mark.parametrize(
    ("given", "chosen", "gone"),
    [
        ({"preset": "grpo", "kl_in": "none"}, {"kl_in": "none"}, ["kl_coefficient", "kl_estimator"]),
        (
            {"preset": "reinforce_pp", "kl_in": "loss", "kl_coefficient": 0.1},
            {"kl_in": "loss", "kl_estimator": "k3", "kl_coefficient": 0.1},
            [],
        ),
        (
            {"preset": "dr_grpo", "loss_normalization": "token"},
            {"loss_normalization": "token"},
            ["loss_constant"],
        ),
        (
            {"preset": "dapo", "length_penalty": "none"},
            {"length_penalty": "none"},
            ["overlong_limit", "overlong_buffer"],
        ),
        ({"preset": "dapo", "drop_equal_groups": False}, {"refill_equal_groups": False}, []),
        ({"preset": "ppo", "estimator": "group"}, {"advantage_mean": "group"}, ["value_clip", "gae_lambda"]),
        (
            {"preset": "rloo", "estimator": "gae"},
            {"estimator": "gae", "advantage_std": "batch"},
            ["leave_one_out"],
        ),
        ({"preset": "m2po", "trust_region": "none"}, {"trust_region": "none"}, ["m2po_threshold"]),
        ({"preset": "gspo", "policy_loss": "ppo"}, {"clip_low": 0.2, "clip_high": 0.2}, ["gspo_level"]),
        ({"preset": "gspo", "correction": "mask"}, {"correction_level": "token"}, []),
        ({"proximal": "behavior"}, {"correction": "none"}, ["weight_cap", "correction_level"]),
        ({"preset": "ppo", "policy_loss": "sft"}, {"estimator": "none"}, ["advantage_mean", "value_clip"]),
    ],
)
def test_settings_of_a_replaced_part_are_dropped(given: dict, chosen: dict, gone: list[str]) -> None:
    made = flat(config(**given).model_dump())
    assert {name: made[name] for name in chosen} == chosen
    assert not set(gone) & made.keys()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"preset": "grop"}, "no preset 'grop'; did you mean 'grpo'"),
        ({"preset": "drgrpo"}, "did you mean 'dr_grpo'"),
        ({"preset": ["grpo"]}, "preset must be a string, the name of a preset, got ['grpo']"),
        # a setting of a part that was not chosen, also at its default value
        ({"preset": "ppo", "leave_one_out": True}, "leave_one_out: true needs estimator: group"),
        ({"gae_lambda": 0.95}, "gae_lambda: 0.95 needs estimator: gae"),
        ({"gae_lambda": 1.0}, "gae_lambda: 1.0 needs estimator: gae"),
        ({"value_clip": 0.2}, "value_clip: 0.2 needs estimator: gae"),
        ({"value_clip": None}, "value_clip: null needs estimator: gae"),
        ({"preset": "ppo", "turn_discount": 0.9}, "turn_discount: 0.9 needs credit: reward_to_go"),
        ({"turn_discount": 1.0}, "turn_discount: 1.0 needs credit: reward_to_go"),
        ({"kl_coefficient": 0.1}, "kl_coefficient: 0.1 needs kl_in: reward or kl_in: loss"),
        ({"preset": "gspo", "dual_clip": 3.0}, "dual_clip: 3.0 needs policy_loss: ppo"),
        ({"gspo_level": "turn"}, "gspo_level: turn needs policy_loss: gspo"),
        ({"preset": "sapo", "clip_high": 0.3}, "clip_high: 0.3 needs policy_loss: ppo or policy_loss: gspo"),
        ({"preset": "grpo", "sapo_tau_positive": 2.0}, "needs policy_loss: sapo"),
        ({"weight_floor": 0.5}, "weight_floor: 0.5 needs correction: mask"),
        ({"weight_floor": 0.0}, "weight_floor: 0.0 needs correction: mask"),
        ({"loss_constant": 10}, "needs loss_normalization: constant"),
        ({"preset": "dpo", "sft_min_score": 1.0}, "sft_min_score: 1.0 needs policy_loss: sft"),
        ({"dpo_beta": 0.5}, "needs policy_loss: dpo"),
        (
            {"preset": "sft", "advantage_mean": "batch"},
            "advantage_mean: batch needs estimator: group or estimator: gae",
        ),
        (
            {"preset": "dpo", "advantage_std": "none"},
            "advantage_std: none needs estimator: group or estimator: gae",
        ),
        ({"preset": "sft", "veto": 1e-4}, "veto: 0.0001 needs correction: truncate or correction: mask"),
        ({"proximal": "behavior", "weight_cap": 2.0}, "weight_cap: 2.0 needs correction: truncate"),
        # a part without a required setting
        ({"kl_in": "loss"}, "kl_in.loss.kl_coefficient\n  Field required"),
        ({"preset": "grpo", "kl_in": "reward"}, "kl_in.reward.kl_coefficient\n  Field required"),
        ({"preset": "grpo", "kl_coefficient": 0.0}, "greater than 0"),
        ({"loss_normalization": "constant"}, "loss_constant\n  Field required"),
        ({"overlong_buffer": 10}, "overlong_limit\n  Field required"),
        ({"overlong_limit": 10}, "overlong_buffer\n  Field required"),
        (
            {"preset": "dapo", "overlong_limit": 1000},
            "needs an overlong_buffer from 1 to the limit, got 4096",
        ),
        ({"preset": "dapo", "length_penalty": None}, "length_penalty must be one of none, linear"),
        # values out of range
        ({"clip_low": 1.0}, "less than 1"),
        ({"correction": "mask", "weight_floor": 5.0}, "leave out the weight of an on-policy token"),
        ({"correction": "mask", "weight_floor": 1.0}, "weight_floor: 1.0 and weight_cap: 5.0 leave"),
        ({"correction": "mask", "weight_cap": 0.9}, "weight_floor: 0.0 and weight_cap: 0.9 leave"),
        ({"veto": 2e-9}, "greater than 0.00000000206"),
        ({"reward_scale": float("nan")}, "finite"),
        ({"credit": "reward_to_go", "turn_discount": 1.5}, "less than or equal to 1"),
        # parts that cannot be combined
        ({"advantage_mean": "none", "leave_one_out": True}, "leave_one_out: true needs"),
        ({"credit": "step_normalized", "leave_one_out": True}, "whose mean is over steps"),
        ({"credit": "step_normalized", "kl_in": "reward", "kl_coefficient": 0.1}, "use kl_in: loss"),
        ({"advantage_statistics": "token", "leave_one_out": True}, "can be combined with neither"),
        ({"advantage_statistics": "token", "credit": "step_normalized"}, "can be combined with neither"),
        (
            {"advantage_statistics": "token", "advantage_mean": "none", "advantage_std": "none"},
            "needs an advantage_mean or an advantage_std",
        ),
        ({"preset": "rloo", "std_estimator": "population"}, "needs an advantage_std"),
        ({"preset": "ppo", "advantage_std": "none", "std_estimator": "population"}, "needs an advantage_std"),
        (
            {"kl_in": "loss", "kl_estimator": "k1", "kl_coefficient": 0.1},
            "gradient of k1 in the loss is 0 on average",
        ),
        ({"reward_bias": -0.5}, "reward_bias: -0.5 is subtracted again with the mean"),
        ({"reward_scale": 2.0}, "reward_scale: 2.0 is divided out again by the deviation"),
        (
            {"preset": "distillation", "correction": "truncate"},
            "weights a position by the ratio of the token sampled",
        ),
        ({"preset": "distillation", "proximal": "behavior"}, "whose loss uses no ratio of policies"),
        ({"preset": "m2po", "correction_level": "geometric"}, "would still count in the weights of their"),
        ({"preset": "clip_cov", "veto": 0.001}, "would still count in the weights of their sequences"),
        ({"preset": "gspo", "trust_region": "m2po"}, "the ratio of gspo is of a sequence"),
        ({"preset": "m2po", "policy_loss": "gspo", "gspo_level": "turn"}, "the ratio of gspo is of a turn"),
        ({"proximal": "behavior", "m2po_threshold": 0.04}, "computes no logprobs under the weights"),
        (
            {"proximal": "behavior", "kl_in": "reward", "kl_coefficient": 0.1},
            "computes no logprobs under the weights",
        ),
        (
            {"proximal": "behavior", "correction": "truncate"},
            "corrects for the ratio proximal/behavior",
        ),
        ({"preset": "sft", "drop_equal_groups": False}, "drop_equal_groups: false has no meaning for sft"),
        ({"preset": "sft", "kl_in": "reward", "kl_coefficient": 0.1}, "kl_in: reward has no meaning for sft"),
        ({"preset": "sft", "correction": "truncate"}, "correction: truncate has no meaning for sft"),
        ({"preset": "sft", "trust_region": "m2po"}, "trust_region: m2po has no meaning for sft"),
        ({"preset": "sft", "entropy_coefficient": 0.1}, "entropy_coefficient: 0.1 has no meaning for sft"),
        ({"preset": "sft", "estimator": "group"}, "cannot be combined with policy_loss: sft"),
        ({"preset": "grpo", "estimator": "none"}, "cannot be combined with policy_loss: ppo"),
        ({"preset": "dpo", "reward_scale": 2.0}, "reward_scale: 2.0 has no meaning for dpo"),
        ({"preset": "dpo", "loss_normalization": "constant", "loss_constant": 9}, "a mean over pairs"),
        ({"drop_equal_groups": False, "refill_equal_groups": True}, "because otherwise no group is missing"),
    ],
)
def test_invalid_settings_are_refused_with_the_reason(given: dict, reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**given)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"reward_scale": 2.0, "advantage_std": "none"},
        {"reward_scale": 2.0, "reward_clip": 1.0},
        {"reward_scale": 2.0, "kl_in": "reward", "kl_coefficient": 0.1},
        {"reward_scale": 2.0, "overlong_limit": 10, "overlong_buffer": 5},
        {"reward_scale": 2.0, "preset": "ppo"},
        {"reward_bias": -0.5, "reward_clip": 1.0},
        {"reward_bias": -0.5, "advantage_mean": "none"},
        {"reward_bias": -0.5, "preset": "ppo"},
    ],
)
def test_shaping_that_has_an_effect_is_allowed(given: dict) -> None:
    made = flat(config(**given).model_dump())
    assert {name: made[name] for name in given} == given


def test_a_value_clip_without_effect_causes_a_warning() -> None:
    with pytest.warns(UserWarning, match="value_clip has no effect with algorithm.minibatches: 1"):
        config(preset="ppo", minibatches=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(preset="ppo")
        config(preset="ppo", minibatches=1, value_clip=None)


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(ValidationError, match=r"gae_lambda.*dpo_beta"):
        config(gae_lambda=0.9, dpo_beta=0.2)


@pytest.mark.parametrize(
    ("name", "critic", "reference", "token_credit", "supervised"),
    [
        ("decoupled_ppo", False, False, False, False),
        ("ppo", True, False, True, False),
        ("grpo", False, True, False, False),
        ("reinforce_pp", False, True, True, False),
        ("sft", False, False, False, True),
        ("dpo", False, True, False, True),
    ],
)
def test_a_preset_needs_the_right_models_and_credit(
    name: str, critic: bool, reference: bool, token_credit: bool, supervised: bool
) -> None:
    made = config(preset=name)
    assert (made.needs_critic, made.needs_reference) == (critic, reference)
    assert (made.needs_token_credit, made.is_supervised) == (token_credit, supervised)


def test_the_steps_to_add_a_loss_work_as_documented(tmp_path: Path) -> None:
    """Follow the steps on a copy of the package: the new loss is selected by name and equals its oracle."""
    steps = DOCS.read_text().split("## Adding a loss")[1].split("\n## ")[0]
    blocks = [
        textwrap.dedent(block)
        for block in re.findall(r"   ```(?:python|text)\n(.*?)   ```", steps, re.DOTALL)
    ]
    loss, imported, member, oracle = blocks
    root = DOCS.parents[1]
    shutil.copytree(
        root / "areal_agents", tmp_path / "areal_agents", ignore=shutil.ignore_patterns("__pycache__")
    )
    losses = tmp_path / "areal_agents" / "algorithms" / "losses"
    (losses / "tapered.py").write_text(loss)
    registry = (losses / "registry.py").read_text()
    registry = registry.replace("\nPolicyLoss =", imported + "\nPolicyLoss =", 1)
    registry = registry.replace("    | GspoLoss", f"    {member.strip()}\n    | GspoLoss", 1)
    (losses / "registry.py").write_text(registry)
    for name in ("losses_support.py", "test_policy_losses.py"):
        shutil.copy(Path(__file__).parent / name, tmp_path / name)
    with (tmp_path / "test_policy_losses.py").open("a") as file:
        file.write("\n\n" + oracle)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "tapered", "test_policy_losses.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "...." in done.stdout
