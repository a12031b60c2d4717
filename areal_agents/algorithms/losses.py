"""Policy losses over the selected tokens of a micro-batch.

Every loss is a sum over tokens divided by a global count that the caller gives, so that the
gradient does not depend on how a batch was cut into micro-batches or spread over ranks. Log-ratios
are float32, and masked before the exponential.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0

SUMS = (
    "tokens",
    "loss",
    "clipped_low",
    "clipped_high",
    "kl_k1",
    "kl_k3",
    "weight",
    "weight_squared",
    "weight_capped",
    "abs_diff",
    "on_policy_tokens",
    "on_policy_abs_diff",
    "entropy",
)
MAXIMA = ("abs_diff_max", "on_policy_abs_diff_max")


@dataclass(frozen=True, slots=True, eq=False)
class LossStatistics:
    """Statistics that add up over micro-batches and ranks.

    Attributes:
        sums: [len(SUMS)] float64, in the order of `SUMS`: number of tokens; loss before the
            division; tokens whose ratio was clipped below and above; k1 and k3 estimates of
            KL(behavior, current); the weight w, w², and how often it was capped;
            |proximal − behavior| logprob, and the same on tokens of the trainer's own version
            (there it is the numerical difference between engine and trainer); entropy.
        maxima: [len(MAXIMA)] float64, in the order of `MAXIMA`.
    """

    sums: Tensor
    maxima: Tensor

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> LossStatistics:
        """Statistics of no tokens."""
        return cls(
            torch.zeros(len(SUMS), dtype=torch.float64, device=device),
            torch.zeros(len(MAXIMA), dtype=torch.float64, device=device),
        )

    def __add__(self, other: LossStatistics) -> LossStatistics:
        return LossStatistics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def as_dict(self) -> dict[str, float]:
        """Every sum and maximum by name."""
        values = [*self.sums.tolist(), *self.maxima.tolist()]
        return dict(zip((*SUMS, *MAXIMA), values, strict=True))


def decoupled_ppo_loss(
    current: Tensor,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
    denominator: float,
    on_policy: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, LossStatistics]:
    """Decoupled PPO with a capped weight: arXiv 2505.24298, eq. 5 (after arXiv 2110.00641).

        loss = − Σ_t m_t · min(w_t, cap) · min(u_t Â_t, clip(u_t, 1 − ε_low, 1 + ε_high) Â_t) / denominator
        w_t  = sg(π_prox / μ)          u_t = π_θ / sg(π_prox)

    The weight is always applied; the cap truncates it, so a capped token stays in the sum and in
    the denominator. Log-ratios are clamped to ±20.

    Args:
        current: [N] logprobs under the weights being trained; the only input with a gradient.
        proximal: [N] logprobs under the weights when the batch began (detached here).
        behavior: [N] logprobs under the policy that sampled each token.
        advantages: [N]; mask: [N] bool, tokens outside it count for nothing.
        denominator: number of trained tokens over all micro-batches and ranks, > 0.
        on_policy: [N] bool, tokens that the trainer's own version sampled, for the statistics.
        entropy: [N] of the current policy, for the statistics.

    Returns:
        The loss, a float32 scalar (a share: micro-batches and ranks add up), and its statistics.

    Raises:
        ValueError: shapes that differ, or a denominator that is not positive.
    """
    shapes = {tuple(t.shape) for t in (current, proximal, behavior, advantages, mask)}
    if len(shapes) != 1:
        raise ValueError(f"expected arrays of one shape, got {sorted(shapes)}")
    if not denominator > 0:
        raise ValueError(f"the denominator must be positive, got {denominator}")
    zero = torch.zeros((), dtype=torch.float32, device=current.device)
    proximal, behavior = proximal.detach().float(), behavior.float()
    log_weight = torch.where(mask, proximal - behavior, zero).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_ratio = torch.where(mask, current.float() - proximal, zero).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages = torch.where(mask, advantages.float(), zero)
    weight, ratio = log_weight.exp(), log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = weight.clamp(max=weight_cap) * torch.minimum(unclipped, clipped)
    loss = -torch.where(mask, objective, zero).sum() / denominator
    with torch.no_grad():
        statistics = _statistics(
            log_ratio, log_weight, weight, unclipped, clipped, advantages, mask, objective,
            weight_cap=weight_cap, on_policy=on_policy, entropy=entropy,
        )  # fmt: skip
    return loss, statistics


def _statistics(
    log_ratio: Tensor,
    log_weight: Tensor,
    weight: Tensor,
    unclipped: Tensor,
    clipped: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: Tensor,
    *,
    weight_cap: float,
    on_policy: Tensor | None,
    entropy: Tensor | None,
) -> LossStatistics:
    log_current_over_behavior = log_ratio + log_weight
    k3 = torch.expm1(log_current_over_behavior) - log_current_over_behavior
    is_clipped = clipped < unclipped
    abs_diff = log_weight.abs()
    own = mask if on_policy is None else mask & on_policy
    no_entropy = torch.zeros_like(log_ratio)

    def total(values: Tensor, where: Tensor = mask) -> Tensor:
        return torch.where(where, values.double(), 0.0).sum()

    def largest(where: Tensor) -> Tensor:
        return torch.cat([abs_diff[where].double(), no_entropy.new_zeros(1, dtype=torch.float64)]).amax()

    sums = {
        "tokens": mask.sum().double(),
        "loss": -total(objective),
        "clipped_low": total(is_clipped & (advantages < 0)),
        "clipped_high": total(is_clipped & (advantages > 0)),
        "kl_k1": -total(log_current_over_behavior),
        "kl_k3": total(k3),
        "weight": total(weight.clamp(max=weight_cap)),
        "weight_squared": total(weight.clamp(max=weight_cap) ** 2),
        "weight_capped": total(weight > weight_cap),
        "abs_diff": total(abs_diff),
        "on_policy_tokens": own.sum().double(),
        "on_policy_abs_diff": total(abs_diff, own),
        "entropy": total(no_entropy if entropy is None else entropy),
    }
    maxima = [largest(mask), largest(own)]
    return LossStatistics(torch.stack([sums[name] for name in SUMS]), torch.stack(maxima))
