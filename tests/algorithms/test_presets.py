"""Presets: what they set, what wins over them, what is refused, and that the documentation says the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from areal_agents.algorithms.config import AlgorithmConfig
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


def test_the_documentation_lists_what_each_preset_sets_and_its_paper() -> None:
    table = documented()
    assert list(table) == list(PRESETS)
    for name, (settings, paper) in table.items():
        assert settings == dict(PRESETS[name]), name
        assert re.search(r"arXiv \d{4}\.\d{5}", paper), name


def test_the_documentation_names_every_part() -> None:
    text = DOCS.read_text()
    aside = {
        "preset",
        "exclude_labels",
        "sapo_tau_positive",
        "sapo_tau_negative",
    }  # not parts; or as sapo_tau_*
    assert [
        name for name in AlgorithmConfig.model_fields if name not in aside and f"`{name}" not in text
    ] == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_parts_and_nothing_else(name: str) -> None:
    made = AlgorithmConfig.model_validate(name)
    assert made == config(preset=name) == AlgorithmConfig(preset=name)
    expected = {**AlgorithmConfig().model_dump(), **PRESETS[name], "preset": name}
    assert made.model_dump() == expected


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_being_written_out_in_full(name: str) -> None:
    made = config(preset=name)
    assert AlgorithmConfig.model_validate(made.model_dump(mode="json")) == made


def test_the_default_is_decoupled_ppo_as_it_was() -> None:
    made = AlgorithmConfig()
    assert made.preset == "decoupled_ppo"
    assert (made.clip_low, made.clip_high, made.weight_cap, made.minibatches) == (0.2, 0.2, 5.0, 1)
    assert (made.advantage_mean, made.advantage_std, made.std_estimator) == ("group", "group", "sample")
    assert made.loss_normalization == "token" and made.drop_equal_groups


def test_what_is_given_wins() -> None:
    assert config(preset="dapo", clip_high=0.3, overlong_limit=5000).clip_high == 0.3
    assert config(preset="gspo", clip_low=0.1).clip_low == 0.1
    assert config(preset="rloo", leave_one_out=False).leave_one_out is False


@pytest.mark.parametrize(
    ("given", "dropped"),
    [
        ({"preset": "grpo", "kl_in": "none"}, {"kl_coefficient": 0.0, "kl_estimator": "k3"}),
        ({"preset": "reinforce_pp", "kl_coefficient": 0.0}, {"kl_in": "none", "kl_estimator": "k3"}),
        ({"preset": "dr_grpo", "loss_normalization": "token"}, {"loss_constant": None}),
        ({"preset": "dapo", "overlong_limit": None}, {"overlong_buffer": 0}),
        ({"preset": "dapo", "drop_equal_groups": False}, {"refill_equal_groups": False}),
        ({"preset": "ppo", "estimator": "group"}, {"value_clip": None}),
        ({"preset": "rloo", "estimator": "gae"}, {"leave_one_out": False}),
        ({"preset": "m2po", "policy_loss": "gspo"}, {"m2po_threshold": None}),
        ({"preset": "ppo", "policy_loss": "sft", "estimator": "none"}, {"advantage_mean": "group"}),
    ],
)
def test_what_a_given_part_switches_off_goes_with_it(given: dict, dropped: dict) -> None:
    made = config(**given)
    assert {name: getattr(made, name) for name in dropped} == dropped


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"preset": "grop"}, "no preset 'grop'; did you mean 'grpo'"),
        ({"preset": "drgrpo"}, "did you mean 'dr_grpo'"),
        ({"preset": "ppo", "leave_one_out": True}, "the critic is the baseline"),
        ({"advantage_mean": "none", "leave_one_out": True}, "leave_one_out: True needs"),
        ({"gae_lambda": 0.95}, "gae_lambda: 0.95 needs estimator: gae"),
        ({"value_clip": 0.2}, "there is no critic"),
        ({"preset": "ppo", "turn_discount": 0.9}, "the discount is gae_discount"),
        ({"kl_coefficient": 0.1}, "kl_coefficient: 0.1 needs kl_in"),
        ({"kl_in": "loss"}, "kl_in: loss needs a kl_coefficient above 0"),
        ({"preset": "grpo", "kl_in": "reward", "kl_coefficient": 0.0}, "needs a kl_coefficient above 0"),
        ({"preset": "gspo", "dual_clip": 3.0}, "dual_clip: 3.0 needs policy_loss: ppo"),
        ({"preset": "gspo", "m2po_threshold": 0.04}, "the ratio of gspo is of whole sequences"),
        ({"preset": "sapo", "clip_high": 0.3}, "needs a loss that clips"),
        ({"preset": "grpo", "sapo_tau_positive": 2.0}, "needs policy_loss: sapo"),
        ({"clip_low": 1.0}, "only cispo"),
        ({"weight_floor": 0.5}, "needs correction_action: mask"),
        ({"proximal": "behavior", "m2po_threshold": 0.04}, "has no weights of the batch to go by"),
        ({"proximal": "behavior", "weight_cap": 2.0}, "corrects for the distance from proximal to behavior"),
        ({"correction": "mask", "weight_floor": 5.0}, "leave out the weight of an on-policy token"),
        ({"correction": "mask", "weight_floor": 1.0}, "weight_floor: 1.0 and weight_cap: 5.0 leave"),
        ({"correction": "mask", "weight_cap": 0.9}, "weight_floor: 0.0 and weight_cap: 0.9 leave"),
        ({"veto": 2e-9}, "veto: 2e-09 is never met, log-ratios end at -20; give more than 2.1e-09"),
        ({"reward_bias": -0.5}, "reward_bias: -0.5 is taken off again with the mean"),
        ({"preset": "sft", "drop_equal_groups": False}, "drop_equal_groups: False has no meaning for sft"),
        ({"preset": "sft", "advantage_mean": "batch"}, "advantage_mean: batch has no meaning for sft"),
        ({"preset": "dpo", "advantage_std": "none"}, "advantage_std: none has no meaning for sft and dpo"),
        ({"preset": "sft", "kl_in": "reward", "kl_coefficient": 0.1}, "has no meaning for sft and dpo"),
        ({"preset": "sft", "veto": 1e-4}, "has no meaning for sft and dpo"),
        ({"preset": "sft", "estimator": "group"}, "does not go with policy_loss: sft"),
        ({"preset": "grpo", "estimator": "none"}, "does not go with policy_loss: ppo"),
        ({"preset": "dpo", "reward_scale": 2.0}, "has no meaning for sft and dpo"),
        ({"preset": "dpo", "loss_normalization": "constant", "loss_constant": 9}, "a mean over pairs"),
        ({"preset": "dpo", "sft_min_score": 1.0}, "sft_min_score: 1.0 needs policy_loss: sft"),
        ({"dpo_beta": 0.5}, "needs policy_loss: dpo"),
        ({"overlong_buffer": 10}, "overlong_buffer: 10 needs an overlong_limit"),
        ({"overlong_limit": 10}, "needs an overlong_buffer from 1 to the limit, got 0"),
        ({"preset": "dapo", "overlong_limit": 1000}, "got 4096"),
        ({"drop_equal_groups": False, "refill_equal_groups": True}, "no group is missing otherwise"),
        ({"loss_normalization": "constant"}, "needs a loss_constant"),
        ({"loss_constant": 10}, "needs loss_normalization: constant"),
        ({"preset": "rloo", "std_estimator": "population"}, "needs an advantage_std"),
        ({"reward_scale": float("nan")}, "finite"),
        ({"clip_hight": 0.2}, "Extra inputs"),
        ({"preset": ["grpo"]}, "string"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(given: dict, reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**given)
    assert reason in str(caught.value)


def test_every_reason_is_given_at_once() -> None:
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
def test_what_a_preset_needs(
    name: str, critic: bool, reference: bool, token_credit: bool, supervised: bool
) -> None:
    made = config(preset=name)
    assert (made.needs_critic, made.needs_reference) == (critic, reference)
    assert (made.needs_token_credit, made.is_supervised) == (token_credit, supervised)
