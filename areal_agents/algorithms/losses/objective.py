"""The loss of a micro-batch, composed of its parts as the algorithm's settings say.

A loss is a share: Σ_t c_t · l_t with coefficients over the whole minibatch, so that micro-batches and
ranks add up and the gradient does not depend on how the minibatch was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.correction import Correction, correct, uncorrected
from areal_agents.algorithms.losses.kl import kl_estimate
from areal_agents.algorithms.losses.statistics import MAXIMA, SUMS, LossStatistics, measure
from areal_agents.algorithms.losses.ppo import TokenLosses, cispo, gspo, likelihood, ppo, sapo
from areal_agents.algorithms.losses.ratios import Sequences, log_ratio, widen

__all__ = ["MAXIMA", "SUMS", "LossStatistics", "policy_loss"]


def policy_loss(
    current: Tensor,
    *,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    sequence_ids: Tensor,
    algorithm: AlgorithmConfig,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    on_policy: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, LossStatistics]:
    """The share of the loss that these tokens have.

        loss = Σ_t c_t k_t (w_t ℓ_t + β KL_t − α H_t)

    with c the normalisation, k 0 for a token that is rejected or not kept, w the off-policy weight
    π_prox/μ (1 for SFT and DPO), ℓ the policy loss, β the KL coefficient if the KL is in the loss and
    α the entropy coefficient. By default this is decoupled PPO with a capped weight: arXiv 2505.24298,
    eq. 5. All tokens given are trained; a token out of `keep` counts for nothing, whatever its arrays
    hold. c is fixed beforehand, so tokens rejected or not kept stay in the denominator.

    Args:
        current: [N] logprobs under the weights being trained, with a gradient.
        proximal: [N] logprobs under the weights when the batch began (detached here).
        behavior: [N] logprobs under the policy that sampled each token.
        advantages: [N]; 1 for SFT, the coefficients of `dpo` for DPO.
        loss_weights: [N] c_t, see `normalization.loss_weights`.
        sequence_ids: [N] int64; tokens of one TrainingSample share one, and no micro-batch splits it.
        reference: [N] logprobs under the reference policy; needed if the KL is in the loss.
        entropy: [N] of the current policy; with a gradient if the entropy coefficient is not 0.
        on_policy: [N] bool, tokens that the trainer's own version sampled, for the statistics.
        keep: [N] bool, the mask of `m2po`.

    Returns:
        The loss, a scalar (float32 for half and single precision), and its statistics.

    Raises:
        ValueError: shapes that differ, or a reference or entropy that the settings need and is missing.
    """
    optional = [t for t in (reference, entropy, on_policy, keep) if t is not None]
    _check_shapes(current, proximal, behavior, advantages, loss_weights, sequence_ids, *optional)
    if algorithm.kl_in == "loss" and reference is None:
        raise ValueError("a KL in the loss needs the logprobs of the reference policy, got none")
    if algorithm.entropy_coefficient and entropy is None:
        raise ValueError("an entropy coefficient needs the entropies of the current policy, got none")
    keep = torch.ones_like(current, dtype=torch.bool) if keep is None else keep
    sequences = Sequences.of(sequence_ids, keep=keep)
    proximal = proximal.detach()
    log_weight = log_ratio(proximal, behavior, keep=keep).detach()
    log_u = log_ratio(current, proximal, keep=keep)
    logprobs, advantages = _masked(current, keep), _masked(advantages, keep)

    correction = _correction(log_weight, sequences, algorithm)
    policy = _token_losses(log_u, logprobs, advantages, sequences, algorithm)
    weighted = correction.weight * policy.values
    total = weighted
    kl = None
    if reference is not None:
        kl = kl_estimate(current, reference, estimator=algorithm.kl_estimator, keep=keep)
        if algorithm.kl_in == "loss":
            total = total + algorithm.kl_coefficient * kl
    if algorithm.entropy_coefficient and entropy is not None:
        total = total - algorithm.entropy_coefficient * _masked(entropy, keep)
    trained = keep & ~correction.rejected
    loss = (loss_weights * torch.where(trained, total, torch.zeros_like(total))).sum()
    with torch.no_grad():
        statistics = measure(
            weighted, log_u, log_weight, correction, policy, sequences,
            kl=kl, entropy=entropy, on_policy=on_policy,
        )  # fmt: skip
    return loss, statistics


def _check_shapes(*tensors: Tensor) -> None:
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) != 1:
        raise ValueError(f"expected arrays of one shape, got {sorted(shapes)}")


def _masked(values: Tensor, keep: Tensor) -> Tensor:
    values = widen(values)
    return torch.where(keep, values, torch.zeros_like(values))


def _correction(log_weight: Tensor, sequences: Sequences, algorithm: AlgorithmConfig) -> Correction:
    if algorithm.is_supervised:
        return uncorrected(log_weight, sequences)
    return correct(
        log_weight,
        sequences,
        level=algorithm.correction_level,
        action=algorithm.correction_action,
        cap=algorithm.weight_cap,
        floor=algorithm.weight_floor,
        veto=algorithm.veto,
    )


def _token_losses(
    log_u: Tensor, logprobs: Tensor, advantages: Tensor, sequences: Sequences, algorithm: AlgorithmConfig
) -> TokenLosses:
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.policy_loss:
        case "ppo":
            return ppo(log_u, advantages, clip_low=low, clip_high=high, dual_clip=algorithm.dual_clip)
        case "gspo":
            return gspo(log_u, advantages, sequences, clip_low=low, clip_high=high)
        case "cispo":
            return cispo(log_u, logprobs, advantages, clip_low=low, clip_high=high)
        case "sapo":
            positive, negative = algorithm.sapo_tau_positive, algorithm.sapo_tau_negative
            return sapo(log_u, advantages, tau_positive=positive, tau_negative=negative)
        case "sft" | "dpo":
            return likelihood(logprobs, advantages)
