"""The interface of a policy loss: its inputs, its results, and the settings that it declares.

u = π_θ/π_prox throughout, given as its clamped logarithm. Each loss returns ℓ_t [N], of which
`objective.policy_loss` makes Σ_t c_t w_t ℓ_t. With u = 1, which is every policy gradient loss on its first
minibatch, the gradient of ℓ is −A ∇log π, except for the tokens that `dppo` masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from areal_agents.algorithms.parts import Part

if TYPE_CHECKING:
    from torch import Tensor

    from areal_agents.algorithms.losses.ratios import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The N tokens over which a loss is computed.

    Attributes:
        log_ratio: [N] log u, masked and clamped, with the gradient.
        logprobs: [N] of the current policy, masked, with the gradient.
        behavior: [N] logprobs of the policy that sampled each token, masked.
        advantages: [N], 0 where masked.
        sequences: which tokens lie on one root-to-leaf path.
        turns: which tokens lie in one turn.
        divergence: [N] of the current policy from a teacher, masked, with the gradient; None without one.
    """

    log_ratio: Tensor
    logprobs: Tensor
    behavior: Tensor
    advantages: Tensor
    sequences: Sequences
    turns: Sequences
    divergence: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """The loss of each token, before weights and normalisation.

    Attributes:
        values: [N], with the gradient.
        clipped_low, clipped_high: [N] bool, the token was clipped or masked at the lower or upper bound; None
            if the loss has no such bound.
        dual_clipped: [N] bool, the dual clip bounded the loss; None: nowhere.
        unweighted: [N] a term that is added without the off-policy weight, with the gradient; None means 0.
        ratio: [N] the ratio that the loss compared with its bounds, where it is not the token's own u.
    """

    values: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None
    dual_clipped: Tensor | None = None
    unweighted: Tensor | None = None
    ratio: Tensor | None = None


class LossPart(Part):
    """The settings of a policy loss.

    Attributes:
        uses_advantages: whether the loss is multiplied by advantages, so that it needs an estimator.
        is_supervised: whether it uses recorded episodes unchanged, whichever policy sampled them.
        needs_reference: whether it needs the logprobs of a reference policy.
        implies: settings of the algorithm that this loss implies where nothing else is given.
    """

    uses_advantages: ClassVar[bool] = True
    is_supervised: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    implies: ClassVar[Mapping[str, Any]] = {}

    @property
    def ratio_level(self) -> str:
        """The unit over which a ratio is computed: "token", "turn" or "sequence"."""
        return "token"

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        """ℓ_t of each token."""
        raise NotImplementedError


# The settings that a loss without advantages and without a behavior policy implies.
SUPERVISED: Mapping[str, Any] = {
    "estimator": "none",
    "correction": "none",
    "kl_in": "none",
    "trust_region": "none",
    "entropy_coefficient": 0.0,
    "drop_equal_groups": True,
    "refill_equal_groups": False,
}
