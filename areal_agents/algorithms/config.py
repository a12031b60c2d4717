"""The algorithm's settings. Each is one part of the method; a preset chooses the parts of a paper.

What is given wins over the preset. A combination in which a setting would do nothing, or contradict
another, is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from areal_agents.algorithms.presets import preset_values
from areal_agents.algorithms.rules import contradictions, idle_settings, without_idle

Estimator = Literal["group", "gae", "none"]
NormLevel = Literal["group", "batch", "none"]
StdEstimator = Literal["sample", "population"]
GaeLevel = Literal["token", "turn"]
PolicyLoss = Literal["ppo", "gspo", "cispo", "sapo", "sft", "dpo"]
LossNormalization = Literal["token", "sequence_mean", "sequence_sum", "constant"]
Proximal = Literal["batch", "behavior"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
CorrectionAction = Literal["truncate", "mask"]
KlPlace = Literal["none", "reward", "loss"]
KlEstimator = Literal["k1", "k2", "k3"]


class AlgorithmConfig(BaseModel):
    """Decoupled PPO with group-relative advantages unless a preset or a field says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: str = Field(default="decoupled_ppo", description="The algorithm that fills what is not given.")

    estimator: Estimator = Field(
        default="group", description="Advantages against the group, by a critic (gae), or none (sft, dpo)."
    )
    advantage_mean: NormLevel = Field(default="group", description="Where the subtracted mean is taken.")
    advantage_std: NormLevel = Field(default="group", description="Where the dividing deviation is taken.")
    std_estimator: StdEstimator = Field(
        default="sample", description="sample divides by n - 1 (as torch.std does), population by n."
    )
    leave_one_out: bool = Field(
        default=False, description="The subtracted mean is over the other episodes only (RLOO)."
    )
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="λ of GAE.")
    gae_discount: float = Field(default=1.0, ge=0, le=1, description="γ of GAE, per token or per turn.")
    gae_level: GaeLevel = Field(default="token", description="Whether a step of GAE is a token or a turn.")
    turn_discount: float = Field(
        default=1.0, ge=0, le=1, description="Discount of rewards of later turns along a branch."
    )

    reward_scale: float = Field(default=1.0, gt=0, description="Every reward is multiplied by it.")
    reward_bias: float = Field(default=0.0, description="Added to the episode reward before the scale.")
    reward_clip: float | None = Field(
        default=None, gt=0, description="Scaled rewards are clipped to ± this; absent: not clipped."
    )
    overlong_limit: int | None = Field(
        default=None, ge=1, description="Sampled tokens of an episode at which the length penalty is full."
    )
    overlong_buffer: int = Field(
        default=0, ge=0, description="The penalty grows linearly over this many tokens before the limit."
    )
    overlong_factor: float = Field(default=1.0, gt=0, description="The full length penalty.")
    drop_equal_groups: bool = Field(
        default=True, description="Leave out groups whose episodes all have one score."
    )
    refill_equal_groups: bool = Field(
        default=False, description="Lease other groups in the place of those (DAPO's dynamic sampling)."
    )

    policy_loss: PolicyLoss = Field(default="ppo", description="The policy's loss.")
    clip_low: float = Field(default=0.2, gt=0, le=1, description="The ratio is clipped at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped at 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="For negative advantages the objective is at least this times them."
    )
    sapo_tau_positive: float = Field(default=1.0, gt=0, description="SAPO's τ at positive advantages.")
    sapo_tau_negative: float = Field(default=1.05, gt=0, description="SAPO's τ at negative advantages.")
    m2po_threshold: float | None = Field(
        default=None, gt=0, description="Mean squared log-ratio that M2PO leaves in a batch."
    )
    loss_normalization: LossNormalization = Field(
        default="token", description="Mean over tokens; over sequences of their mean or sum; or a constant."
    )
    loss_constant: int | None = Field(
        default=None, ge=1, description="Tokens that a sequence's sum is divided by (constant)."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps per batch.")

    proximal: Proximal = Field(
        default="batch",
        description="The policy that updates stay near. batch: the weights when the batch begins (decoupled "
        "PPO). behavior: what sampled the token (naive PPO).",
    )
    correction_level: CorrectionLevel = Field(
        default="token",
        description="The weight proximal/behavior: per token, sequence, or its geometric mean.",
    )
    correction_action: CorrectionAction = Field(
        default="truncate", description="A weight out of bounds is truncated, or its tokens are masked."
    )
    weight_cap: float = Field(default=5.0, gt=0, description="Upper bound of the weight proximal/behavior.")
    weight_floor: float = Field(default=0.0, ge=0, description="Lower bound of the weight (mask only).")
    veto: float | None = Field(
        default=None, gt=0, lt=1, description="A sequence with a token's weight below it is left out."
    )

    kl_in: KlPlace = Field(default="none", description="Where the KL to the reference policy is charged.")
    kl_estimator: KlEstimator = Field(default="k3", description="The estimate of that KL per token.")
    kl_coefficient: float = Field(default=0.0, ge=0, description="Weight of that KL.")

    value_clip: float | None = Field(
        default=None, gt=0, description="Values move at most this far from the old ones in the value loss."
    )
    value_coefficient: float = Field(default=1.0, gt=0, description="Weight of the value loss.")

    train_constrained: bool = Field(
        default=False, description="Train turns drawn under a grammar or with a sampling pin lifted."
    )
    exclude_labels: tuple[str, ...] = Field(
        default=(),
        description="Turns with these labels are credited, not trained; sub-agent/* means every sub-agent.",
    )
    sft_min_score: float | None = Field(
        default=None, description="SFT on episodes of at least this score; absent: on the best of each group."
    )
    dpo_beta: float = Field(default=0.1, gt=0, description="β of DPO.")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"preset": given}
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"expected the name of a preset or a mapping of settings, got {given!r}")
        name = given.get("preset", cls.model_fields["preset"].default)
        if not isinstance(name, str):
            return given
        return without_idle(preset_values(name), given, cls._defaults())

    @model_validator(mode="after")
    def _check_combination(self) -> AlgorithmConfig:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        faults = [*idle_settings(values, self._defaults()).values(), *contradictions(values)]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {name: field.default for name, field in cls.model_fields.items()}

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.estimator == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy is loaded."""
        return self.kl_in != "none" or self.policy_loss == "dpo"

    @property
    def needs_token_credit(self) -> bool:
        """Whether advantages wait for values or penalties: `token_credit.token_advantages` makes them."""
        return self.estimator == "gae" or self.kl_in == "reward"

    @property
    def is_supervised(self) -> bool:
        """Whether it learns from recorded episodes as they are: no advantages, no off-policy weight."""
        return self.policy_loss in ("sft", "dpo")
