"""The algorithm's settings: a choice of parts, each with its own settings, with defaults from a preset.

A given setting takes precedence over the preset. A combination in which a setting would have no effect, or
would contradict another one, is refused with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from areal_agents.algorithms.credit.anchors import TurnAnchor
from areal_agents.algorithms.credit.estimators import (
    Estimator,
    GaeEstimator,
    GdpoEstimator,
    GroupEstimator,
    MaxRlEstimator,
    NoEstimator,
)
from areal_agents.algorithms.credit.returns import EpisodeCredit, RewardToGo, StepNormalized, TurnGroups
from areal_agents.algorithms.credit.rewards import LENGTH_PENALTY, NoLengthPenalty, RewardShaping
from areal_agents.algorithms.credit.trained import TrainedTurns
from areal_agents.algorithms.losses.correction import Correction, NoCorrection, TruncateCorrection
from areal_agents.algorithms.losses.distillation import DistillationLoss, TeacherKind
from areal_agents.algorithms.losses.kl import KlInReward, KlPlace, NoKl
from areal_agents.algorithms.losses.normalization import Normalization, TokenMean
from areal_agents.algorithms.losses.ppo import PpoLoss
from areal_agents.algorithms.losses.registry import PolicyLoss
from areal_agents.algorithms.losses.trust_region import KlCov, NoTrustRegion, TrustRegion
from areal_agents.algorithms.parts import as_yaml, differing, fill, kind_given
from areal_agents.algorithms.presets import preset_values
from areal_agents.algorithms.replay import NoReplay, Replay
from areal_agents.core.settings import Settings

Proximal = Literal["batch", "behavior"]

_NO_TOKEN_RETURN = (
    "cannot be combined with kl_in: reward, which subtracts a penalty from the return of each token: its "
    "advantages are not differences of such returns; use kl_in: loss"
)


class AlgorithmConfig(Settings):
    """Decoupled PPO with group-relative advantages unless a preset or a setting says otherwise.

    Settings can be given flat (`clip_high=0.3`) or under their part (`policy_loss={"kind": "ppo",
    "clip_high": 0.3}`); see `parts.fill`.
    """

    preset: str = Field(
        default="decoupled_ppo", description="The algorithm whose settings apply unless others are given."
    )

    estimator: Estimator = Field(
        default_factory=GroupEstimator,
        description="How advantages are estimated: relative to the group (group, maxrl, gdpo), with a critic "
        "(gae), or not at all (none).",
    )
    rewards: RewardShaping = Field(
        default_factory=RewardShaping, description="How recorded rewards are shaped before training."
    )
    policy_loss: PolicyLoss = Field(default_factory=PpoLoss, description="The policy's loss.")
    correction: Correction = Field(
        default_factory=TruncateCorrection,
        description="Weights proximal/behavior that are out of bounds are truncated, or their tokens are "
        "masked (mask).",
    )
    trust_region: TrustRegion = Field(
        default_factory=NoTrustRegion,
        description="Which tokens of a minibatch lose their gradient, or are penalised.",
    )
    loss_normalization: Normalization = Field(
        default_factory=TokenMean,
        description="What the loss is averaged over: tokens, episode means or sums, or a constant length.",
    )
    kl_in: KlPlace = Field(
        default_factory=NoKl,
        description="Where the KL to the reference policy is added: reward, loss, or nowhere (none).",
    )

    proximal: Proximal = Field(
        default="batch",
        description="The policy that updates stay close to. batch: the weights when the batch begins "
        "(decoupled "
        "PPO). behavior: the policy that sampled the token (naive PPO).",
    )
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps per batch.")
    entropy_coefficient: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    observation_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the cross entropy of the environment's tokens (ECHO uses 0.05); 0: none.",
    )
    drop_equal_groups: bool = Field(
        default=True, description="Leave out equal groups, whose scores or advantages are all the same."
    )
    refill_equal_groups: bool = Field(
        default=False, description="Lease other groups in place of equal ones (DAPO's dynamic sampling)."
    )
    replay: Replay = Field(
        default_factory=NoReplay, description="Whether groups are trained on again: none, recent."
    )
    truncated: Literal["score", "mask"] = Field(
        default="score",
        description="Turns of truncated episodes are trained with the score that they have, or not trained "
        "(mask); their score stays in the baseline either way.",
    )
    train_constrained: bool = Field(
        default=False,
        description="Train turns sampled under a grammar or with a sampling pin lifted; their gradient is "
        "biased (docs/algorithms.md, Constrained turns).",
    )
    exclude_labels: tuple[str, ...] = Field(
        default=(),
        description="Turns with these labels are credited, not trained; sub-agent/* means every sub-agent.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"preset": given}
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"must be the name of a preset or a mapping of settings, got {as_yaml(given)}")
        name = given.get("preset", cls.model_fields["preset"].default)
        if not isinstance(name, str):
            raise ValueError(f"preset must be a string, the name of a preset, got {as_yaml(name)}")
        preset = dict(preset_values(name))
        loss = kind_given(cls, "policy_loss", given, preset)
        if loss is not None:
            preset |= getattr(loss, "implies", {})
        if given.get("proximal") == "behavior":
            preset["correction"] = "none"
        if given.get("drop_equal_groups") is False:
            preset["refill_equal_groups"] = False
        return {**fill(cls, given, preset), "preset": name}

    @model_validator(mode="after")
    def _check_combination(self) -> AlgorithmConfig:
        if faults := [*self._faults()]:
            raise ValueError("; ".join(faults))
        estimator = self.estimator
        if isinstance(estimator, GaeEstimator) and estimator.value_clip and self.minibatches == 1:
            warnings.warn(
                "algorithm.value_clip has no effect with algorithm.minibatches: 1, where no value has "
                "changed "
                "yet; raise minibatches, or leave value_clip out",
                stacklevel=2,
            )
        return self

    def _faults(self) -> Iterator[str]:
        """Describe what is wrong with this combination, one sentence for each error."""
        loss, estimator = self.policy_loss, self.estimator
        if loss.uses_advantages == isinstance(estimator, NoEstimator):
            needs = "needs advantages (estimator: group, maxrl, gdpo or gae)"
            if not loss.uses_advantages:
                needs = "uses no advantages (estimator: none)"
            yield (
                f"estimator: {estimator.kind} cannot be combined with policy_loss: {loss.kind}, which {needs}"
            )
        if loss.is_supervised:
            yield from self._supervised_faults()
        elif isinstance(loss, DistillationLoss):
            yield from self._distillation_faults()
        else:
            yield from self._reward_faults()
            yield from self._policy_faults()
        if self.refill_equal_groups and not self.drop_equal_groups:
            yield "refill_equal_groups needs drop_equal_groups, because otherwise no group is missing"

    def _supervised_faults(self) -> Iterator[str]:
        """Describe policy gradient settings given for a loss that has neither advantages nor a behavior
        policy."""
        fields = type(self).model_fields
        for name in (
            "rewards", "correction", "trust_region", "kl_in", "proximal", "entropy_coefficient",
            "drop_equal_groups", "refill_equal_groups",
        ):  # fmt: skip
            standard, value = fields[name].get_default(call_default_factory=True), getattr(self, name)
            if name == "correction":
                standard = NoCorrection()
            if value == standard:
                continue
            changed = [(name, value)]
            if isinstance(value, RewardShaping):
                changed = [*differing(value, RewardShaping())]
            for setting, chosen in changed:
                kind = getattr(chosen, "kind", chosen)
                shown = kind if isinstance(kind, str) else as_yaml(kind)
                yield (
                    f"{setting}: {shown} has no meaning for {self.policy_loss.kind}, which learns from "
                    "recorded episodes unchanged, without advantages and without a behavior policy"
                )
        if self.policy_loss.kind == "dpo" and not isinstance(self.loss_normalization, TokenMean):
            yield "loss_normalization has no meaning for dpo, whose loss is a mean over pairs"

    def _distillation_faults(self) -> Iterator[str]:
        """Describe settings of rewards, advantages and ratios given for a loss that uses none of them."""
        for setting, value in differing(self.rewards, RewardShaping()):
            kind = getattr(value, "kind", value)
            shown = kind if isinstance(kind, str) else as_yaml(kind)
            yield f"{setting}: {shown} has no meaning for distillation, whose loss uses no reward"
        if isinstance(self.kl_in, KlInReward):
            yield "kl_in: reward has no meaning for distillation, whose loss uses no reward; use kl_in: loss"
        if not isinstance(self.trust_region, NoTrustRegion):
            yield f"trust_region: {self.trust_region.kind} needs advantages, and distillation has none"
        if self.proximal == "behavior":
            yield "proximal: behavior has no meaning for distillation, whose loss uses no ratio of policies"
        if not isinstance(self.correction, NoCorrection):
            yield (
                f"correction: {self.correction.kind} weights a position by the ratio of the token sampled "
                "there, on which the divergence of distillation does not depend; leave it out"
            )
        if self.drop_equal_groups:
            yield "drop_equal_groups: distillation learns from every group; leave it out"

    def _reward_faults(self) -> Iterator[str]:
        shaping, estimator = self.rewards, self.estimator
        unclipped, in_reward = shaping.reward_clip is None, isinstance(self.kl_in, KlInReward)
        if isinstance(estimator, GroupEstimator):
            credit = estimator.credit
            keeps_bias = isinstance(credit, TurnGroups) and credit.keeps_bias
            if shaping.reward_bias and unclipped and estimator.advantage_mean != "none" and not keeps_bias:
                yield (
                    f"reward_bias: {shaping.reward_bias} is subtracted again with the mean; it needs "
                    "estimator: gae, advantage_mean: none, or a reward_clip"
                )
            alone = isinstance(shaping.length_penalty, NoLengthPenalty) and not in_reward
            if shaping.reward_scale != 1 and unclipped and alone and estimator.advantage_std != "none":
                yield (
                    f"reward_scale: {shaping.reward_scale} is divided out again by the deviation; it needs "
                    "advantage_std: none, a reward_clip, a length_penalty, or kl_in: reward"
                )
            if isinstance(credit, StepNormalized | TurnGroups) and in_reward:
                yield f"credit: {credit.kind} {_NO_TOKEN_RETURN}"
        if isinstance(estimator, MaxRlEstimator | GdpoEstimator) and in_reward:
            yield f"estimator: {estimator.kind} {_NO_TOKEN_RETURN}"
        if isinstance(estimator, MaxRlEstimator):
            if shaping.reward_scale != 1 and unclipped:
                yield (
                    f"reward_scale: {shaping.reward_scale} is divided out again by the mean of estimator: "
                    "maxrl; it needs a reward_clip"
                )
            if not isinstance(shaping.length_penalty, NoLengthPenalty):
                yield (
                    f"length_penalty: {shaping.length_penalty.kind} makes scores negative, and estimator: "
                    "maxrl divides by their mean; use estimator: group or gdpo"
                )
        if isinstance(estimator, GdpoEstimator):
            yield from self._gdpo_faults(estimator)

    def _gdpo_faults(self, estimator: GdpoEstimator) -> Iterator[str]:
        shaping, weights = self.rewards, estimator.reward_weights
        for name in ("reward_scale", "reward_bias", "reward_clip"):
            if getattr(shaping, name) != RewardShaping.model_fields[name].default:
                yield (
                    f"{name}: {getattr(shaping, name)} has no meaning for estimator: gdpo, which normalises "
                    "the sum of each reward name as given; use reward_weights, or change the rewards"
                )
        penalized = not isinstance(shaping.length_penalty, NoLengthPenalty)
        if penalized and weights and LENGTH_PENALTY not in weights:
            yield (
                f"length_penalty: {shaping.length_penalty.kind} is a reward of its own name for estimator: "
                "gdpo, and reward_weights has no weight for length_penalty"
            )

    def _policy_faults(self) -> Iterator[str]:
        loss, region = self.policy_loss, self.trust_region
        if not isinstance(region, NoTrustRegion) and loss.ratio_level != "token":
            yield (
                f"trust_region: {region.kind} chooses single tokens, but the ratio of {loss.kind} is of a "
                f"{loss.ratio_level}"
            )
        elif not isinstance(region, NoTrustRegion) and self.looks_at_sequences:
            yield (
                f"trust_region: {region.kind} leaves out single tokens, which would still count in the "
                "weights of their sequences; use correction_level: token or turn, without a veto"
            )
        if isinstance(region, KlCov) and self.minibatches == 1:
            yield (
                "trust_region: kl_cov penalises a distance that is 0 with minibatches: 1; raise minibatches"
            )
        if self.proximal == "behavior":
            if not isinstance(region, NoTrustRegion) or isinstance(self.kl_in, KlInReward):
                yield (
                    "proximal: behavior computes no logprobs under the weights when the batch begins, "
                    "which a trust_region and kl_in: reward need"
                )
            if not isinstance(self.correction, NoCorrection):
                yield (
                    f"correction: {self.correction.kind} corrects for the ratio proximal/behavior, which is "
                    "1 with proximal: behavior; leave it out"
                )

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return isinstance(self.estimator, GaeEstimator)

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy is loaded."""
        return not isinstance(self.kl_in, NoKl) or self.policy_loss.needs_reference

    @property
    def teacher(self) -> TeacherKind | None:
        """The kind of the teacher; None without distillation."""
        return self.policy_loss.teacher if isinstance(self.policy_loss, DistillationLoss) else None

    @property
    def needs_token_credit(self) -> bool:
        """Whether advantages are computed by `credit.tokens.token_advantages`, from values or penalties."""
        if isinstance(self.estimator, GroupEstimator) and self.estimator.advantage_statistics == "token":
            return True
        return self.needs_critic or isinstance(self.kl_in, KlInReward)

    @property
    def is_supervised(self) -> bool:
        """Whether the loss learns from recorded episodes without advantages and off-policy weights."""
        return self.policy_loss.is_supervised

    @property
    def looks_at_sequences(self) -> bool:
        """Whether a part takes products or means over whole root-to-leaf paths."""
        correction = self.correction
        if self.policy_loss.ratio_level == "sequence":
            return True
        if isinstance(correction, NoCorrection):
            return False
        return correction.correction_level in ("sequence", "geometric") or correction.veto is not None

    @property
    def looks_at_turns(self) -> bool:
        """Whether a part takes products or means over whole turns."""
        correction = self.correction
        if self.policy_loss.ratio_level == "turn":
            return True
        return not isinstance(correction, NoCorrection) and correction.correction_level in (
            "turn",
            "turn_geometric",
        )

    @property
    def turn_anchor(self) -> TurnAnchor | None:
        """The anchor by which turns of a group are compared with one another; None if they are not
        compared."""
        estimator = self.estimator
        if isinstance(estimator, GroupEstimator) and isinstance(estimator.credit, TurnGroups):
            return estimator.credit.turn_group_by
        return None

    @property
    def compares_scores(self) -> bool:
        """Whether a group counts as equal if its scores are equal, whatever the rewards of single turns."""
        estimator = self.estimator
        if isinstance(estimator, GdpoEstimator):
            return False
        if not isinstance(estimator, GroupEstimator):
            return True
        by_score = isinstance(estimator.credit, EpisodeCredit)
        return by_score or (isinstance(estimator.credit, RewardToGo) and estimator.advantage_std == "group")

    @property
    def trained_turns(self) -> TrainedTurns:
        """The rule that chooses the trained turns; supervised losses need no sampling distribution."""
        return TrainedTurns(
            constrained=self.train_constrained,
            greedy=self.is_supervised,
            truncated=self.truncated == "score",
            exclude_labels=self.exclude_labels,
        )
