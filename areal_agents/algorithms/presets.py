"""Published algorithms as choices of parts: only what differs from the defaults of `AlgorithmConfig`.

The defaults are decoupled PPO. Every policy gradient preset keeps its truncated weight π_prox/μ. The papers
train synchronously and do not need it: on-policy the weight is 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Methods that act on the ratio π_θ/π_prox have four minibatches, because with a single one it is 1.
_RATIO: dict[str, Any] = {"minibatches": 4}
_ALL_GROUPS: dict[str, Any] = {"drop_equal_groups": False}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "decoupled_ppo": {},
        "ppo": {
            **_RATIO,
            **_ALL_GROUPS,
            "estimator": "gae",
            "gae_lambda": 1.0,
            "gae_discount": 1.0,
            "gae_level": "token",
            "advantage_mean": "batch",
            "advantage_std": "batch",
            "value_clip": 0.2,
        },
        "grpo": {
            **_ALL_GROUPS,
            "loss_normalization": "sequence_mean",
            "kl_in": "loss",
            "kl_estimator": "k3",
            "kl_coefficient": 0.04,
        },
        "dr_grpo": {
            **_ALL_GROUPS,
            "advantage_std": "none",
            "loss_normalization": "constant",
            "loss_constant": 3000,
        },
        "rloo": {
            **_ALL_GROUPS,
            "leave_one_out": True,
            "advantage_std": "none",
            "loss_normalization": "sequence_sum",
        },
        "reinforce_pp": {
            **_RATIO,
            **_ALL_GROUPS,
            "advantage_mean": "batch",
            "advantage_std": "batch",
            "kl_in": "reward",
            "kl_estimator": "k1",
            "kl_coefficient": 0.01,
        },
        "maxrl": {**_ALL_GROUPS, "estimator": "maxrl"},
        "gdpo": {**_ALL_GROUPS, "estimator": "gdpo"},
        "gigpo": {
            **_ALL_GROUPS,
            "credit": "turn_groups",
            "turn_group_by": "observation",
            "turn_return": "reward_to_go",
            "turn_discount": 0.95,
            "turn_weight": 1.0,
            "kl_in": "loss",
            "kl_estimator": "k3",
            "kl_coefficient": 0.01,
        },
        "mt_grpo": {
            **_ALL_GROUPS,
            "credit": "turn_groups",
            "turn_group_by": "position",
            "turn_return": "own",
            "turn_weight": 1.0,
            "episode_return": "outcome",
        },
        "lite_ppo": {**_RATIO, **_ALL_GROUPS, "advantage_std": "batch"},
        "dapo": {
            **_RATIO,
            "clip_high": 0.28,
            "refill_equal_groups": True,
            "length_penalty": "linear",
            "overlong_limit": 20_480,
            "overlong_buffer": 4_096,
            "overlong_factor": 1.0,
        },
        "gspo": {
            **_RATIO,
            **_ALL_GROUPS,
            "policy_loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "loss_normalization": "sequence_mean",
            "correction_level": "geometric",
        },
        "cispo": {**_RATIO, "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        "sapo": {
            **_RATIO,
            **_ALL_GROUPS,
            "policy_loss": "sapo",
            "sapo_tau_positive": 1.0,
            "sapo_tau_negative": 1.05,
            "loss_normalization": "sequence_mean",
        },
        "dppo": {"advantage_std": "none", "policy_loss": "dppo"},
        "clip_cov": {
            **_RATIO,
            "policy_loss": "unclipped",
            "trust_region": "clip_cov",
            "clip_cov_share": 2e-4,
            "clip_cov_low": 1.0,
            "clip_cov_high": 5.0,
        },
        "kl_cov": {
            **_RATIO,
            "policy_loss": "unclipped",
            "trust_region": "kl_cov",
            "kl_cov_share": 2e-3,
            "kl_cov_coefficient": 1.0,
        },
        "m2po": {**_RATIO, **_ALL_GROUPS, "trust_region": "m2po", "m2po_threshold": 0.04},
        "distillation": {"policy_loss": "distillation", "teacher": "model"},
        "self_distillation": {"policy_loss": "distillation", "teacher": "self", "distill_top_k": 64},
        "sft": {"policy_loss": "sft", "train_constrained": True},
        "dpo": {"policy_loss": "dpo", "dpo_beta": 0.1, "train_constrained": True},
    }
)


def preset_values(name: str) -> Mapping[str, Any]:
    """The settings of a preset.

    Raises:
        ValueError: there is no preset with this name; the message suggests the nearest one.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)
        raise ValueError(
            f"there is no preset {name!r}; did you mean {near[0]!r}? Known: {', '.join(PRESETS)}"
        )
    return PRESETS[name]
