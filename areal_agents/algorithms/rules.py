"""Which settings of an algorithm act only beside others, and which contradict each other.

A setting that would do nothing is refused, so that nobody trains with another method than the one
that the config reads like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

LOG_RATIO_LIMIT = 20.0  # of the two policies' logprobs; here, since settings depend on it, without torch
Values = Mapping[str, Any]
_Rule = tuple[tuple[str, ...], Callable[[Values], bool], str]


def _reinforced(values: Values) -> bool:
    return values["policy_loss"] not in ("sft", "dpo")


_RULES: tuple[_Rule, ...] = (
    (
        ("leave_one_out",),
        lambda v: v["estimator"] == "group" and v["advantage_mean"] != "none",
        "needs estimator: group and an advantage_mean to leave an episode out of; with a critic, "
        "the critic is the baseline",
    ),
    (
        ("gae_lambda", "gae_discount", "gae_level", "value_clip", "value_coefficient"),
        lambda v: v["estimator"] == "gae",
        "needs estimator: gae, there is no critic otherwise",
    ),
    (
        ("turn_discount",),
        lambda v: v["estimator"] == "group",
        "needs estimator: group; with a critic the discount is gae_discount",
    ),
    (
        ("std_estimator",),
        lambda v: v["estimator"] != "none" and v["advantage_std"] != "none",
        "needs an advantage_std",
    ),
    (
        ("reward_scale", "reward_bias", "reward_clip", "overlong_limit", "entropy_coefficient",
         "m2po_threshold", "correction_level", "correction_action", "veto", "kl_in"),
        _reinforced,
        "has no meaning for sft and dpo, which have neither rewards in the loss nor a behavior policy",
    ),
    (
        ("advantage_mean", "advantage_std", "drop_equal_groups"),
        _reinforced,
        "has no meaning for sft and dpo, which have no advantages and choose among episodes themselves",
    ),
    (
        ("reward_bias",),
        lambda v: v["estimator"] == "gae" or v["advantage_mean"] == "none" or v["reward_clip"] is not None,
        "is taken off again with the mean; it needs estimator: gae, advantage_mean: none, or a reward_clip",
    ),
    (
        ("overlong_buffer", "overlong_factor"),
        lambda v: v["overlong_limit"] is not None,
        "needs an overlong_limit",
    ),
    (
        ("refill_equal_groups",),
        lambda v: v["drop_equal_groups"] and _reinforced(v),
        "needs drop_equal_groups, no group is missing otherwise",
    ),
    (
        ("clip_low", "clip_high"),
        lambda v: v["policy_loss"] in ("ppo", "gspo", "cispo"),
        "needs a loss that clips: ppo, gspo or cispo",
    ),
    (
        ("dual_clip",),
        lambda v: v["policy_loss"] == "ppo",
        "needs policy_loss: ppo; the other losses bound the ratio of negative advantages themselves",
    ),
    (
        ("sapo_tau_positive", "sapo_tau_negative"),
        lambda v: v["policy_loss"] == "sapo",
        "needs policy_loss: sapo",
    ),
    (
        ("m2po_threshold",),
        lambda v: v["policy_loss"] != "gspo",
        "drops single tokens, and the ratio of gspo is of whole sequences",
    ),
    (
        ("loss_normalization",),
        lambda v: v["policy_loss"] != "dpo",
        "has no meaning for dpo, whose loss is a mean over pairs",
    ),
    (
        ("loss_constant",),
        lambda v: v["loss_normalization"] == "constant",
        "needs loss_normalization: constant",
    ),
    (
        ("proximal",),
        lambda v: _reinforced(v) and v["m2po_threshold"] is None and v["kl_in"] != "reward",
        "has no weights of the batch to go by, which m2po_threshold and kl_in: reward need, and no meaning "
        "for sft and dpo",
    ),
    (
        ("correction_level", "correction_action", "weight_cap", "veto"),
        lambda v: v["proximal"] == "batch",
        "corrects for the distance from proximal to behavior, which is none with proximal: behavior",
    ),
    (
        ("weight_floor",),
        lambda v: v["correction_action"] == "mask",
        "needs correction_action: mask; truncation has an upper bound only",
    ),
    (
        ("weight_cap",),
        _reinforced,
        "has no meaning for sft and dpo, which have no behavior policy",
    ),
    (
        ("kl_estimator", "kl_coefficient"),
        lambda v: v["kl_in"] != "none",
        "needs kl_in: reward or loss",
    ),
    (
        ("kl_in",),
        lambda v: v["kl_coefficient"] > 0,
        "needs a kl_coefficient above 0",
    ),
    (
        ("sft_min_score",),
        lambda v: v["policy_loss"] == "sft",
        "needs policy_loss: sft",
    ),
    (
        ("dpo_beta",),
        lambda v: v["policy_loss"] == "dpo",
        "needs policy_loss: dpo",
    ),
)  # fmt: skip


def idle_settings(values: Values, defaults: Values) -> dict[str, str]:
    """The settings, by name, that differ from their default and yet would do nothing, with the reason."""
    idle: dict[str, str] = {}
    for names, acts, reason in _RULES:
        for name in names:
            if values[name] != defaults[name] and not acts(values):
                idle.setdefault(name, f"{name}: {values[name]} {reason}")
    return idle


def without_idle(chosen: Values, given: Values, defaults: Values) -> dict[str, Any]:
    """`chosen` overridden by `given`, less what was chosen but does nothing beside what is given."""
    filled = {**chosen, **given}
    while idle := [name for name in idle_settings({**defaults, **filled}, defaults) if name not in given]:
        for name in idle:
            del filled[name]
    return filled


def contradictions(values: Values) -> list[str]:
    """What a combination is wrong about, a sentence each; empty if nothing."""
    faults = []
    supervised = not _reinforced(values)
    if supervised != (values["estimator"] == "none"):
        faults.append(
            f"estimator: {values['estimator']} does not go with policy_loss: {values['policy_loss']}; "
            "sft and dpo have no advantages (estimator: none), every other loss needs them (group or gae)"
        )
    if values["overlong_limit"] is not None and not 0 < values["overlong_buffer"] <= values["overlong_limit"]:
        faults.append(
            f"overlong_limit: {values['overlong_limit']} needs an overlong_buffer from 1 to the limit, "
            f"got {values['overlong_buffer']}"
        )
    if values["loss_normalization"] == "constant" and values["loss_constant"] is None:
        faults.append("loss_normalization: constant needs a loss_constant, for example rollout.max_tokens")
    if not values["weight_floor"] < 1 <= values["weight_cap"]:
        faults.append(
            f"weight_floor: {values['weight_floor']} and weight_cap: {values['weight_cap']} leave out the "
            "weight of an on-policy token, which is 1; give a floor below 1 and a cap of at least 1"
        )
    if values["veto"] is not None and values["veto"] <= math.exp(-LOG_RATIO_LIMIT):
        faults.append(
            f"veto: {values['veto']} is never met, log-ratios end at -{LOG_RATIO_LIMIT:g}; give more than "
            f"{math.exp(-LOG_RATIO_LIMIT):.1e}"
        )
    if values["clip_low"] == 1 and values["policy_loss"] != "cispo":
        faults.append("clip_low: 1 removes the lower bound, which only cispo does without; give less than 1")
    return faults
