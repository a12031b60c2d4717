"""The loss of a micro-batch, composed of the parts that the algorithm's settings choose.

A loss is a share: Σ_t c_t · l_t with coefficients over the whole minibatch, so that micro-batches and
ranks add up and the gradient does not depend on how the minibatch was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.correction import Correction, NoCorrection
from areal_agents.algorithms.losses.kl import KlInLoss, KlPlace, NoKl, kl_estimate
from areal_agents.algorithms.losses.loss import LossTokens, TokenLosses
from areal_agents.algorithms.losses.ratios import Sequences, log_ratio, masked, widen
from areal_agents.algorithms.losses.registry import PolicyLoss
from areal_agents.algorithms.losses.statistics import LossStatistics, measure


@dataclass(frozen=True, slots=True)
class Objective:
    """The parts that a policy's loss is composed of."""

    loss: PolicyLoss
    correction: Correction
    kl: KlPlace
    entropy_coefficient: float = 0.0

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Objective:
        """The parts that an algorithm chooses."""
        return cls(
            algorithm.policy_loss, algorithm.correction, algorithm.kl_in, algorithm.entropy_coefficient
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenTerms:
    """The terms of which the loss of each of N tokens is the product, without gradients.

    Attributes:
        current: [N] logprobs under the weights being trained.
        proximal: [N] logprobs; None for a loss without a ratio (SFT, DPO, distillation).
        advantages: [N] as given: 1 for SFT and distillation, the coefficients of the pairs for DPO.
        ratio: [N] π_θ/π_prox as the loss compared it with its bounds: of the token, or for GSPO of its
            sequence or turn; None for a loss without a ratio.
        weight: [N] the off-policy weight as applied, 0 where rejected; None without a correction.
        clipped: [N] uint8, an index into `CLIPPED`.
        kept: [N] bool, False where a trust region dropped the token.
        rejected: [N] bool, where the correction rejected it.
        loss_weights: [N] c_t.
        loss: [N] the token's share: the loss of a minibatch is the sum of the shares of its trained tokens.
        reference: [N] logprobs under the reference policy, None without one.
    """

    current: Tensor
    proximal: Tensor | None
    advantages: Tensor
    ratio: Tensor | None
    weight: Tensor | None
    clipped: Tensor
    kept: Tensor
    rejected: Tensor
    loss_weights: Tensor
    loss: Tensor
    reference: Tensor | None


CLIPPED = ("no", "low", "high", "dual")


def policy_loss(
    current: Tensor,
    objective: Objective,
    *,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    sequence_ids: Tensor,
    turn_ids: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    on_policy: Tensor | None = None,
    keep: Tensor | None = None,
    penalty: Tensor | None = None,
    trained: Tensor | None = None,
    divergence: Tensor | None = None,
    positions: Tensor | None = None,
    replayed: Tensor | None = None,
    rerouted: Tensor | None = None,
) -> tuple[Tensor, LossStatistics, TokenTerms]:
    """Compute these tokens' share of the loss.

        loss = Σ_t c_t k_t (w_t (ℓ_t + γ_t |log u_t|) + β KL_t − α H_t)

    with c the normalisation, k = 0 for a token that is rejected or not kept and 1 otherwise, w the off-policy
    weight π_prox/μ, ℓ the policy loss, γ the penalty of a trust region, β the KL coefficient if the KL is in
    the loss and α the entropy coefficient. A loss may add a term of its own that w does not multiply. By
    default this is decoupled PPO with a capped weight: arXiv 2505.24298, eq. 5. A token outside `keep`
    contributes nothing, whatever its values are. c is fixed beforehand, so rejected and dropped tokens stay
    in the denominator.

    Args:
        current: [N] logprobs under the weights being trained, with a gradient.
        objective: the parts of the loss.
        proximal: [N] logprobs under the weights when the batch began (detached here).
        behavior: [N] logprobs under the policy that sampled each token.
        advantages: [N]; 1 for SFT, the coefficients of `dpo` for DPO.
        loss_weights: [N] c_t, see `normalization.loss_weights`.
        sequence_ids: [N] int64; tokens of one root-to-leaf path share one, and no micro-batch splits it.
        turn_ids: [N] int64; tokens of one turn share one. By default a sequence is one turn.
        reference: [N] logprobs under the reference policy; needed if the KL is in the loss.
        entropy: [N] of the current policy; with a gradient if the entropy coefficient is not 0.
        on_policy: [N] bool, tokens that the trainer's own version sampled, for the statistics.
        keep: [N] bool, the mask of a trust region.
        penalty: [N] γ_t of a trust region, see `trust_region.TokenChoice`.
        trained: [N] bool; the others belong to the path and enter the ratios of sequences, but another
            sample trains them. By default all are trained.
        divergence: [N] of the current policy from a teacher, with a gradient; for distillation.
        positions: [N] int64, where each token is in its sequence; replayed: [N] bool, tokens whose experts
            the engine recorded; rerouted: [N], in which share of the layers the trainer would choose other
            experts; all three for the statistics.

    Returns:
        The loss, a scalar (float32 for half and single precision), its statistics, and the terms of each
        token.

    Raises:
        ValueError: the shapes differ, or a reference or entropy that the settings need is missing.
    """
    turn_ids = sequence_ids if turn_ids is None else turn_ids
    several = (
        reference, entropy, on_policy, keep, penalty, trained, divergence, positions, replayed, rerouted,
    )  # fmt: skip
    optional = [tensor for tensor in several if tensor is not None]
    _check_shapes(current, proximal, behavior, advantages, loss_weights, sequence_ids, turn_ids, *optional)
    if isinstance(objective.kl, KlInLoss) and reference is None:
        raise ValueError("a KL in the loss needs `reference`, the reference policy's logprobs, got None")
    if objective.entropy_coefficient and entropy is None:
        raise ValueError("an entropy coefficient needs `entropy`, of the current policy, got None")
    keep = torch.ones_like(current, dtype=torch.bool) if keep is None else keep
    trained = keep if trained is None else trained & keep
    sequences, turns = Sequences.of(sequence_ids, keep=keep), Sequences.of(turn_ids, keep=keep)
    proximal = proximal.detach()
    log_weight = log_ratio(proximal, behavior, keep=keep).detach()
    tokens = LossTokens(
        log_ratio=log_ratio(current, proximal, keep=keep),
        logprobs=masked(widen(current), keep),
        behavior=masked(widen(behavior), keep),
        advantages=masked(widen(advantages), keep),
        sequences=sequences,
        turns=turns,
        divergence=None if divergence is None else masked(widen(divergence), keep),
    )
    correction = objective.correction.weights(log_weight, sequences=sequences, turns=turns)
    policy = objective.loss.token_losses(tokens)
    values = policy.values
    if penalty is not None:
        values = values + masked(widen(penalty), keep) * tokens.log_ratio.abs()
    weighted = correction.weight * values
    total = weighted if policy.unweighted is None else weighted + policy.unweighted
    kl = None
    if reference is not None:
        estimator = "k3" if isinstance(objective.kl, NoKl) else objective.kl.kl_estimator
        kl = kl_estimate(current, reference, estimator=estimator, keep=keep)
        if isinstance(objective.kl, KlInLoss):
            total = total + objective.kl.kl_coefficient * kl
    if objective.entropy_coefficient and entropy is not None:
        total = total - objective.entropy_coefficient * masked(widen(entropy), keep)
    shares = loss_weights * masked(total, trained & ~correction.rejected)
    with torch.no_grad():
        statistics = measure(
            weighted, tokens.log_ratio, log_weight, correction, policy, sequences, trained=trained,
            kl=kl, entropy=entropy, on_policy=on_policy, positions=positions, replayed=replayed,
            rerouted=rerouted,
        )  # fmt: skip
    has_ratio = objective.loss.uses_advantages
    ratio = tokens.log_ratio.detach().exp() if policy.ratio is None else policy.ratio
    terms = TokenTerms(
        current=current.detach(),
        proximal=proximal if has_ratio else None,
        advantages=advantages,
        ratio=ratio if has_ratio else None,
        weight=None if isinstance(objective.correction, NoCorrection) else correction.weight,
        clipped=_clipped(policy, keep),
        kept=keep,
        rejected=correction.rejected,
        loss_weights=loss_weights,
        loss=shares.detach(),
        reference=reference,
    )
    return shares.sum(), statistics, terms


def _clipped(policy: TokenLosses, like: Tensor) -> Tensor:
    """[N] uint8, which bound took effect at each token; an index into `CLIPPED`."""
    clipped = torch.zeros_like(like, dtype=torch.uint8)
    for code, bound in enumerate((policy.clipped_low, policy.clipped_high, policy.dual_clipped), start=1):
        if bound is not None:
            clipped = clipped.masked_fill(bound, code)
    return clipped


def _check_shapes(*tensors: Tensor) -> None:
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) != 1:
        raise ValueError(f"all tensors must have one shape, got {sorted(shapes)}")
