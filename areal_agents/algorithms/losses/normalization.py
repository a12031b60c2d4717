"""Normalisation of a loss: one coefficient per trained token, computed over a whole minibatch.

The loss is Σ_t c_t · l_t whatever the mode, so that micro-batches and ranks add up and the gradient
does not depend on how the minibatch was cut. A sequence is the trained tokens of one episode, however many
roots and branches they lie in: splitting an episode into roots leaves its weight unchanged. A token that a
correction rejects later stays counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from areal_agents.algorithms.parts import Part
from areal_agents.core.sample import TrainingSample

NormalizationMode = Literal["token", "sequence_mean", "sequence_sum", "constant"]
Floats = npt.NDArray[np.float32]


class TokenMean(Part):
    """Each token has the same weight."""

    kind: Literal["token"] = "token"

    def weights(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """See `loss_weights`."""
        return loss_weights(samples, mode="token")


class SequenceMean(Part):
    """Each episode has the same weight."""

    kind: Literal["sequence_mean"] = "sequence_mean"

    def weights(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """See `loss_weights`."""
        return loss_weights(samples, mode="sequence_mean")


class SequenceSum(Part):
    """The sum over an episode, averaged over episodes."""

    kind: Literal["sequence_sum"] = "sequence_sum"

    def weights(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """See `loss_weights`."""
        return loss_weights(samples, mode="sequence_sum")


class ConstantLength(Part):
    """The sum over an episode divided by a fixed length, averaged over episodes."""

    kind: Literal["constant"] = "constant"
    loss_constant: int = Field(
        ge=1,
        description="Number of tokens by which an episode's sum is divided, for example "
        "rollout.limits.max_tokens.",
    )

    def weights(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """See `loss_weights`."""
        return loss_weights(samples, mode="constant", constant=self.loss_constant)


Normalization = Annotated[
    TokenMean | SequenceMean | SequenceSum | ConstantLength, Field(discriminator="kind")
]


def loss_weights(
    samples: Sequence[TrainingSample], *, mode: NormalizationMode, constant: int | None = None
) -> list[Floats]:
    """Compute c_t of every scored token, an array [N_s] per sample s; 0 where a scored token is not trained.

        token          1 / Σ_e N_e       each token counts the same (DAPO, arXiv 2503.14476, eq. 8)
        sequence_mean  1 / (S · N_e)     each episode counts the same (GRPO, arXiv 2402.03300, eq. 3)
        sequence_sum   1 / S             the sum over an episode, averaged over episodes
        constant       1 / (S · C)       the same over a fixed length C (Dr.GRPO, arXiv 2503.20783)

    N_e is the number of trained tokens of episode e, and S the number of episodes with at least one.

    Args:
        samples: all samples of one optimizer step, over all ranks.
        constant: C in tokens, only for the mode of that name.

    Raises:
        ValueError: the constant is missing, not positive, or given for another mode.
    """
    if (mode == "constant") != (constant is not None) or (constant is not None and constant <= 0):
        raise ValueError(
            "constant must be positive with mode constant, and None with any other mode, got "
            f"{constant} with mode {mode}"
        )
    lengths: Counter[str] = Counter()
    for sample in samples:
        lengths[sample.episode_id] += int(sample.loss_mask.sum())
    tokens, episodes = lengths.total(), sum(length > 0 for length in lengths.values())

    def divisor(length: int) -> int:
        match mode:
            case "token":
                return tokens
            case "sequence_mean":
                return episodes * length
            case "sequence_sum":
                return episodes
            case "constant":
                return episodes * (constant or 1)

    weights = []
    for sample in samples:
        trained = sample.loss_mask[sample.scored_mask]
        length = lengths[sample.episode_id]
        weights.append(np.where(trained, 1 / divisor(length) if length else 0.0, 0.0).astype(np.float32))
    return weights
