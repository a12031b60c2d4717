"""On-policy distillation: the reverse KL to a teacher, at the tokens that the policy itself sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from areal_agents.algorithms.losses.loss import LossPart, LossTokens, TokenLosses

if TYPE_CHECKING:
    from torch import Tensor

_REST_EPSILON = 1e-6  # lower bound of the total probability of the tokens outside the top k

TeacherKind = Literal["model", "engine", "self"]


class DistillationLoss(LossPart):
    """Settings of on-policy distillation (arXiv 2306.13649, section 3, with reverse KL and λ = 1).

    The loss of a token is KL(π_θ, teacher) at its position, over the whole vocabulary for a teacher that
    the trainer holds, else over the teacher's `distill_top_k` most likely tokens and the rest. It needs
    no rewards.

    The divergence at a position depends on the context and not on the token that was sampled there, so
    the weight π_prox/μ of that token, whose mean over the sampled tokens is 1, would only add variance:
    there is no correction. Contexts that older versions sampled are used without a correction, within the
    staleness bound.
    """

    kind: Literal["distillation"] = "distillation"
    teacher: TeacherKind = Field(
        default="model",
        description="model: trainer.teacher_model, held by the trainer. engine: trainer.teacher_url. self: "
        "the policy itself when the batch begins, after it has read the best episode of the group.",
    )
    distill_top_k: int = Field(
        default=64, ge=1, le=1024, description="Tokens of the teacher's distribution (engine and self)."
    )
    uses_advantages: ClassVar[bool] = False
    implies: ClassVar[Mapping[str, Any]] = {
        "estimator": "none",
        "correction": "none",
        "drop_equal_groups": False,
        "refill_equal_groups": False,
    }

    @model_validator(mode="after")
    def _check(self) -> DistillationLoss:
        if self.teacher == "model" and self.distill_top_k != type(self).model_fields["distill_top_k"].default:
            raise ValueError(
                f"distill_top_k: {self.distill_top_k} has no meaning for teacher: model, which is compared "
                "over the whole vocabulary; it needs teacher: engine or self"
            )
        return self

    def token_losses(self, tokens: LossTokens) -> TokenLosses:
        if tokens.divergence is None:
            raise ValueError("distillation needs `divergence`, from the teacher at each token, got None")
        return TokenLosses(tokens.advantages * tokens.divergence)


def reverse_kl_top_k(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(π_θ, teacher) between the distributions over k tokens and "any other token", [N].

        Σ_{i ≤ k} p_i log(p_i / q_i) + p_rest log(p_rest / q_rest),   p_rest = 1 − Σ p_i,  q_rest = 1 − Σ q_i

    Joining tokens into one outcome never raises a divergence, so this is at most the KL over the vocabulary,
    and equal to it where the policy is proportional to the teacher outside of the k tokens.

    Args:
        student: [N, k] logprobs of the policy at the teacher's top tokens, with the gradient.
        teacher: [N, k] logprobs of the teacher there.
    """
    p_rest, q_rest = _log_rest(student), _log_rest(teacher.detach())
    top = (student.exp() * (student - teacher.detach())).sum(-1)
    return top + p_rest.exp() * (p_rest - q_rest)


def _log_rest(top: Tensor) -> Tensor:
    """log(1 − Σ_i e^top_i) [N], at least log(1e-6)."""
    mass = top.exp().sum(-1)
    return (1 - mass).clamp(min=_REST_EPSILON).log()
